"""Conversion of results, partial results and factors to flat lists of tensors, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from persample.merge import Moments, Summed, check_alike
from persample.utils import trees
from persample.utils.tracing import any_exception
from persample.utils.trees import Leaf, Tree


@dataclass(frozen=True)
class Made:
    """A dataclass instance (a mergeable leaf or a factor) without its tensors."""

    kind: type
    parts: tuple[tuple[str, object], ...]  # the names and values of its fields


@dataclass(frozen=True)
class Outline:
    """A tree without its tensors."""

    # the leaves: dataclass instances without tensors, constants, and the class ``Tensor`` for each tensor
    leaves: tuple[object, ...]
    structure: trees.TreeSpec

    def filled(self, tensors: Sequence[Tensor]) -> Tree:
        """Return the tree with tensors in their places, in the order of ``pack``."""
        return trees.unflatten(self.filled_leaves(tensors), self.structure)

    def filled_leaves(self, tensors: Sequence[Tensor]) -> list[object]:
        """Return the leaves of the tree with tensors in their places."""
        rest = iter(tensors)

        def put(x: object) -> object:
            if x is Tensor:
                return next(rest)
            if isinstance(x, Made):
                return x.kind(**{name: put(part) for name, part in x.parts})
            return tuple(map(put, x)) if type(x) is tuple else x

        return list(map(put, self.leaves))


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

    def taken(x: object) -> object:
        if isinstance(x, Tensor):
            tensors.append(x)
            return Tensor
        if type(x) is tuple:
            return tuple(map(taken, x))
        if is_dataclass(x) and not isinstance(x, type):
            return Made(type(x), tuple((field.name, taken(getattr(x, field.name))) for field in fields(x)))
        return x

    leaves, structure = trees.flatten(tree)
    return tensors, Outline(tuple(map(taken, leaves)), structure)


@dataclass(frozen=True)
class Total:
    """The moments and sums of the samples so far."""

    tensors: list[Tensor]  # their numbers, in float64, in memory of their own
    outline: Outline  # the tree of the leaves, with None in place of all others

    @classmethod
    def like(cls, lifted: object) -> Total:
        """Return the total of no samples."""
        tensors, outline = pack(trees.tree_map(lambda x: x.widened() if _is_part(x) else None, lifted))
        return cls(list(map(torch.zeros_like, tensors)), outline)

    def copied(self) -> Total:
        """Return the same total in other memory."""
        return Total([x.clone() for x in self.tensors], self.outline)

    @property
    def leaves(self) -> list[Leaf]:
        """The leaves of the tree."""
        return self.outline.filled_leaves(self.tensors)

    def absorb(self, lifted: Tree) -> list[Leaf]:
        """Merge the leaves of a chunk into the total, in its memory; in a trace, only if its results are valid.

        Returns the leaves that are not part of the total.
        """
        leaves, structure = trees.flatten(lifted)
        check_alike(self.outline.structure, structure)
        pairs = list(zip(self.leaves, leaves, strict=True))
        merged, _ = pack([one.merge(other) for one, other in pairs if one is not None])
        invalid = any_exception()
        for old, new in zip(self.tensors, merged, strict=True):
            old.copy_(new if invalid is None else torch.where(invalid.to(old.device), old, new))
        return [other for one, other in pairs if one is None]


def _is_part(leaf: object) -> bool:
    return isinstance(leaf, Moments | Summed)
