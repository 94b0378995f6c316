"""The total of a stream, which programs write: they merge the leaves of a chunk into it in their own code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from persample.engines.compiled.packing import Outline, pack
from persample.merge import Moments, Summed, check_alike
from persample.utils import trees
from persample.utils.tracing import any_exception


@dataclass(frozen=True)
class Total:
    """The moments and sums of the samples so far.

    Args:
        tensors: their numbers, in float64, in memory of their own.
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

    def copied(self) -> Total:
        """Return the same total in other memory."""
        return Total([x.clone() for x in self.tensors], self.outline)

    @property
    def leaves(self) -> list[Any]:
        """The leaves of the tree."""
        return self.outline.filled_leaves(self.tensors)

    def absorb(self, lifted: Any) -> list[Any]:
        """Merge the leaves of a chunk into the total, in its memory; in a trace, only if its results are valid.

        Args:
            lifted: the tree of the leaves.

        Returns:
            The leaves that are not part of the total.

        Raises:
            LossError: if the leaves do not fit the total.
        """
        leaves, structure = trees.flatten(lifted)
        check_alike(self.outline.structure, structure)
        pairs = list(zip(self.leaves, leaves, strict=True))
        merged, _ = pack([one.merge(other) for one, other in pairs if one is not None])
        invalid = any_exception()
        for old, new in zip(self.tensors, merged, strict=True):
            old.copy_(new if invalid is None else torch.where(invalid.to(old.device), old, new))
        return [other for one, other in pairs if one is None]


def _is_part(leaf: Any) -> bool:
    return isinstance(leaf, Moments | Summed)
