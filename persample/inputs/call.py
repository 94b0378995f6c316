"""The samples of one call, flattened, every batch axis moved to the front."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Call:
    """What the engines iterate over: parameters and batch leaves, some with a leading batch axis.

    Args:
        size: B.
        params: one tensor per differentiated parameter.
        params_batched: which of them hold one parameter per sample, on axis 0.
        leaves: the leaves of the batch, tensors or constants.
        leaves_batched: which of them hold one row per sample, on axis 0.
        weights: ``[B]`` float64, or None for ones.
    """

    size: int
    params: tuple[Tensor, ...]
    params_batched: tuple[bool, ...]
    leaves: tuple[Any, ...]
    leaves_batched: tuple[bool, ...]
    weights: Tensor | None = None

    def chunks(self, chunk_size: int | None) -> Iterator[Call]:
        """Return the samples in pieces of at most ``chunk_size``, in order; no samples are one empty piece."""
        step = chunk_size or self.size
        if step >= self.size:
            yield self
            return
        for start in range(0, self.size, step):
            yield self._piece(slice(start, min(start + step, self.size)))

    def _piece(self, rows: slice) -> Call:
        params, leaves = self.at(rows)
        weights = None if self.weights is None else self.weights[rows]
        return replace(self, size=rows.stop - rows.start, params=params, leaves=leaves, weights=weights)

    def at(self, index: int | slice) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """Return the parameters and the leaves of one sample, or of a range of samples."""

        def pick(values: tuple[Any, ...], batched: tuple[bool, ...]) -> tuple[Any, ...]:
            return tuple(x[index] if split else x for x, split in zip(values, batched, strict=True))

        return pick(self.params, self.params_batched), pick(self.leaves, self.leaves_batched)
