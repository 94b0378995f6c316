"""Second moments of the signals and inputs whose products are the gradients: the Kronecker factors of Fisher blocks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from persample.factors import contractions
from persample.utils import numerics
from persample.utils.trees import Tree


@dataclass(frozen=True)
class TermMoments:
    """Computes Σᵢ wᵢ Σₜ xᵢₜ xᵢₜᵀ of the operands of products, once for layers that share one."""

    weights: Tensor | None  # the wᵢ, ``[B]`` float64, or None for ones
    sums_terms: bool  # whether the terms of each sample are summed first: Σᵢ wᵢ (Σₜ xᵢₜ) (Σₜ xᵢₜ)ᵀ
    max_size: int  # of longer vectors x, in one group, the diagonal alone is computed
    filled: Tensor | None = None  # of units that are padded with terms, as in ``Gradients``
    # By memory, whose tensors are kept alive.
    _found: dict[Tree, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def rows(self, index: slice) -> TermMoments:
        """Return the moments of some of the samples."""
        weights, filled = (None if x is None else x[index] for x in (self.weights, self.filled))
        return replace(self, weights=weights, filled=filled, _found={})

    def of(self, x: Tensor, side: str, outputs: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the moment ``[n, n]`` of ``x [B, 1, T, n]``, or its diagonal ``[n]``; of G groups ``[G, n, n]``.

        Of K outputs ``x`` is ``[B, K, G, T, n]``, or ``[B, 1, G, T, n]`` for what they share, which counts K times.
        What is the left operand of one layer and the right one of another has two moments: they are divided apart.
        """
        key = (numerics.memory_of_rows(x), side, outputs, dtype)
        if key not in self._found:
            moment = self._moment(x, dtype)
            self._found[key] = x, moment * (prod(outputs) / x.shape[1]) if outputs else moment
        return self._found[key][1]

    def _moment(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if self.sums_terms and x.shape[-2] != 1:
            x = x.sum(-2, keepdim=True, dtype=dtype)
        x = x.to(dtype)
        scaled = x if self.weights is None else numerics.scaled_rows(x, self.weights, dtype)
        groups, size = x.shape[-3], x.shape[-1]
        if groups == 1 and size > self.max_size:
            return (scaled * x).flatten(0, -2).sum(0)
        if groups == 1:  # mm is faster than bmm
            return contractions.sum_of_products(*(_in_memory_order(y.squeeze(-3)) for y in (scaled, x)))
        return contractions.sum_of_products(*(y.movedim(-3, 0).flatten(1, -2) for y in (scaled, x)))


def _in_memory_order(x: Tensor) -> Tensor:
    """Return the terms of all samples, ``[B·T, n]``, in the order in which they lie in memory."""
    if x.ndim == 3 and x.stride(1) > x.stride(0):
        x = x.transpose(0, 1)
    return x.flatten(0, -2)


def with_diagonal(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two moments, each of which may be a diagonal alone, as both then are."""
    if one.ndim == other.ndim:
        return one + other
    full, diagonal = (one, other) if one.ndim > other.ndim else (other, one)
    return full + diagonal.diag_embed()
