"""Conversion of results, partial results and factors to flat lists of tensors, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from persample.utils import trees


@dataclass(frozen=True)
class Slot:
    """A placeholder for a tensor of the flat list.

    Args:
        index: the position in the list.
    """

    index: int


@dataclass(frozen=True)
class Made:
    """A dataclass instance (a mergeable leaf or a factor) with slots for its tensors.

    Args:
        kind: the class.
        parts: the names and values of its fields.
    """

    kind: type
    parts: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Outline:
    """A tree with slots for its tensors.

    Args:
        leaves: the leaves: slots, dataclass instances with slots, constants.
        structure: the structure of the tree.
    """

    leaves: tuple[Any, ...]
    structure: trees.TreeSpec

    @cached_property
    def _is_plain(self) -> bool:
        return self.leaves == tuple(map(Slot, range(len(self.leaves))))

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """Return the tree with tensors in its slots.

        Args:
            tensors: one per slot.
        """
        return trees.unflatten(self.filled_leaves(tensors), self.structure)

    def filled_leaves(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Return the leaves of the tree with tensors in its slots.

        Args:
            tensors: one per slot.
        """
        if self._is_plain:
            return list(tensors)

        def put(x: Any) -> Any:
            if isinstance(x, Slot):
                return tensors[x.index]
            if isinstance(x, Made):
                return x.kind(**{name: put(part) for name, part in x.parts})
            return tuple(map(put, x)) if type(x) is tuple else x

        return list(map(put, self.leaves))


def pack(tree: Any) -> tuple[list[Tensor], Outline]:
    """Split a tree into its tensors and its outline.

    Args:
        tree: a pytree of tensors and of dataclasses that hold tensors.

    Examples:
        >>> import torch
        >>> from persample.merge import Summed
        >>> tensors, outline = pack({"sum": Summed(torch.tensor(1.0))})
        >>> outline.filled([torch.tensor(2.0)])["sum"].value
        tensor(2.)
    """
    tensors: list[Tensor] = []

    def taken(x: Any) -> Any:
        if isinstance(x, Tensor):
            tensors.append(x)
            return Slot(len(tensors) - 1)
        if type(x) is tuple:
            return tuple(map(taken, x))
        if is_dataclass(x) and not isinstance(x, type):
            return Made(type(x), tuple((field.name, taken(getattr(x, field.name))) for field in fields(x)))
        return x

    leaves, structure = trees.flatten(tree)
    return tensors, Outline(tuple(map(taken, leaves)), structure)


def drop_failed(graph: GraphModule) -> None:
    """Remove the operations that raised during tracing and whose errors the loss caught: they have no value.

    Args:
        graph: the graph, which the caller must recompile.
    """
    for node in reversed(list(graph.graph.nodes)):
        if node.op == "call_function" and not node.users and "val" not in node.meta:
            graph.graph.erase_node(node)
