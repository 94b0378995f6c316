"""The total of a stream, which programs take and return: they merge it with the leaves of a chunk in their own code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from persample.engines.compiled.packing import Outline, pack
from persample.merge import Moments, Summed, check_alike
from persample.utils import trees

# Numbers in a sum. Larger ones are added up in place: new memory for them costs more than another operation.
_MOST = 2**14


@dataclass(frozen=True)
class Total:
    """The moments and small sums of the samples so far.

    Args:
        tensors: their numbers, in float64.
        outline: the tree of the leaves, with None in place of all others.
    """

    tensors: list[Tensor]
    outline: Outline

    @classmethod
    def like(cls, lifted: Any) -> Total:
        """Return the total of no samples.

        Args:
            lifted: the tree of the leaves of any chunk.
        """
        tensors, outline = pack(trees.tree_map(lambda x: x.widened() if _is_part(x) else None, lifted))
        return cls(list(map(torch.zeros_like, tensors)), outline)

    def split(self, merged: list[Any]) -> tuple[Total, list[Any]]:
        """Return a later total, and the leaves that are not part of it.

        Args:
            merged: what ``merged`` returns.
        """
        count = len(self.tensors)
        return Total(merged[:count], self.outline), merged[count:]

    @property
    def leaves(self) -> list[Any]:
        """The leaves of the tree."""
        return self.outline.filled_leaves(self.tensors)

    def merged(self, lifted: Any) -> list[Any]:
        """Merge the leaves of a chunk into the total.

        Args:
            lifted: the tree of its leaves.

        Returns:
            The tensors of the new total, and then the leaves that are not part of it.

        Raises:
            LossError: if the leaves do not fit the total.
        """
        leaves, structure = trees.flatten(lifted)
        check_alike(self.outline.structure, structure)
        pairs = list(zip(self.leaves, leaves, strict=True))
        tensors, _ = pack([one.merge(other) for one, other in pairs if one is not None])
        return [*tensors, *(other for one, other in pairs if one is None)]


def _is_part(leaf: Any) -> bool:
    return isinstance(leaf, Moments) or (isinstance(leaf, Summed) and leaf.value.numel() <= _MOST)
