"""Conversion of results, partial results and factors to flat lists of tensors, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass

from torch import Tensor

from persample.utils import trees
from persample.utils.trees import Tree


@dataclass(frozen=True)
class Made:
    """A dataclass instance (a mergeable leaf or a factor) without its tensors.

    Args:
        kind: the class.
        parts: the names and values of its fields.
    """

    kind: type
    parts: tuple[tuple[str, object], ...]


@dataclass(frozen=True)
class Outline:
    """A tree without its tensors.

    Args:
        leaves: the leaves: dataclass instances without tensors, constants, and the class ``Tensor`` for each tensor.
        structure: the structure of the tree.
    """

    leaves: tuple[object, ...]
    structure: trees.TreeSpec

    def filled(self, tensors: Sequence[Tensor]) -> Tree:
        """Return the tree with tensors in their places, in the order of ``pack``."""
        return trees.unflatten(self.filled_leaves(tensors), self.structure)

    def filled_leaves(self, tensors: Sequence[Tensor]) -> list[object]:
        """Return the leaves of the tree with tensors in their places."""
        rest = iter(tensors)
        return [_filled(x, rest) for x in self.leaves]


# A nested function that calls itself would keep the tensors in a cycle, until Python collects garbage.
def _filled(x: object, rest: Iterator[Tensor]) -> object:
    if x is Tensor:
        return next(rest)
    if isinstance(x, Made):
        return x.kind(**{name: _filled(part, rest) for name, part in x.parts})
    return tuple(_filled(part, rest) for part in x) if type(x) is tuple else x


def pack(tree: object) -> tuple[list[Tensor], Outline]:
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
    leaves, structure = trees.flatten(tree)
    return tensors, Outline(tuple(_taken(x, tensors) for x in leaves), structure)


def _taken(x: object, tensors: list[Tensor]) -> object:
    if isinstance(x, Tensor):
        tensors.append(x)
        return Tensor
    if type(x) is tuple:
        return tuple(_taken(part, tensors) for part in x)
    if is_dataclass(x) and not isinstance(x, type):
        return Made(type(x), tuple((field.name, _taken(getattr(x, field.name), tensors)) for field in fields(x)))
    return x
