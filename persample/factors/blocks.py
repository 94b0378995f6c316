"""Contractions that write gradients out a few samples at a time, in one buffer: any factor, bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from persample.factors import cost_model
from persample.factors.base import Factor
from persample.factors.dense import Dense
from persample.utils.tracing import is_traced


def written_out(factor: Factor) -> Iterator[tuple[slice, Dense]]:
    """Write the gradients out block by block. A block is valid until the next one is asked for.

    Args:
        factor: the gradients.

    Yields:
        The samples of the block, and their gradients.
    """
    size, step = len(factor), cost_model.rows_at_a_time(len(factor), prod(factor.shape))
    buffer: Tensor | None = None
    for start in range(0, size, step):
        index = slice(start, min(start + step, size))
        count = index.stop - index.start
        buffer = factor.rows(index).materialize(None if buffer is None or is_traced(buffer) else buffer[:count])
        yield index, Dense(buffer)


def squared_norms(factor: Factor) -> Tensor:
    """Return ‖gᵢ‖², ``[B]`` float64.

    Args:
        factor: the gradients.
    """
    return torch.cat([block.squared_norms() for _, block in written_out(factor)])


def second_moment(factor: Factor, weights: Tensor | None, dtype: torch.dtype, center: Tensor | None) -> Tensor:
    """Return Σ wᵢ (gᵢ − center)², elementwise ``[*shape]``.

    Args:
        factor: the gradients.
        weights: ``[B]``, or None for ones.
        dtype: what to accumulate in.
        center: ``[*shape]``, or None for zero.
    """
    total: Tensor | None = None
    for index, block in written_out(factor):
        moment = block.second_moment(None if weights is None else weights[index], dtype, center)
        total = moment if total is None else total.add_(moment)
    return torch.zeros(factor.shape, dtype=dtype, device=factor.device) if total is None else total


def project(factor: Factor, left: Tensor, right: Tensor) -> Tensor:
    """Return ``left[j]ᵀ gᵢ right[j]``, ``[B, K]``.

    Args:
        factor: the gradients.
        left: ``[K, o]``.
        right: ``[K, rest]``.
    """
    return torch.cat([block.project(left, right) for _, block in written_out(factor)])


def gram(factor: Factor, other: Factor) -> Tensor:
    """Return ⟨gᵢ, hⱼ⟩, ``[B, B']``: the gradients of one side are written out whole, those of the other in blocks.

    Args:
        factor: the gradients g.
        other: the gradients h.
    """
    whole = Dense(other.materialize())
    return torch.cat([block.gram(whole) for _, block in written_out(factor)])
