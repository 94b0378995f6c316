"""Contractions of gradients that are written out, ``[B, *shape]``: the defaults of all factors."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from persample.factors import cost_model
from persample.utils import dtypes, tracing

# For so few columns MKL takes up to 5 times as long as for as many rows (torch 2.13, AMD EPYC); for the second number
# up to 3 times as long, if the sums have many terms (Intel Xeon).
_FEW_COLUMNS, _FEW_COLUMNS_OF_MANY_TERMS, _MANY_TERMS = 8, 24, 256
# Blocks of what is converted to another dtype: it is read once, and takes memory of its own.
_CONVERTED = 1 / 4


def sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left.mT @ right``, ``[..., o, i]`` from ``[..., T, o]`` and ``[..., T, i]``."""
    multiply = torch.mm if left.ndim == 2 else torch.matmul
    if has_few_columns(left, right):
        return multiply(right.mT, left).mT.contiguous()
    return multiply(left.mT, right)


def by_output(products: Tensor, block: tuple[int, int, int], sides: tuple[int, int]) -> Tensor:
    """Return ``[n, K, G, o, i]`` from ``[n, G, Kₗ, o, Kᵣ, i]``, some axes of which may be merged.

    Args:
        products: the products of operands that hold all of K outputs.
        block: G, o and i.
        sides: Kₗ and Kᵣ: the outputs are those of one of the operands.
    """
    (groups, rows, columns), (left, right) = block, sides
    return products.reshape(-1, groups, left, rows, right, columns).movedim((2, 4), (1, 2)).flatten(1, 2)


def has_few_columns(left: Tensor, right: Tensor) -> bool:
    """Return whether ``left.mT @ right`` is better computed as its transpose."""
    few = _FEW_COLUMNS_OF_MANY_TERMS if left.shape[-2] >= _MANY_TERMS else _FEW_COLUMNS
    return left.device.type == "cpu" and right.shape[-1] <= few < left.shape[-1]


def weighted_sum(values: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return Σ wᵢ gᵢ, ``[*shape]``, accumulated in ``dtype``; of gradients ``[K, *shape]`` also for ``[B, K]``."""
    if weights is None:
        return values.sum(0, dtype=dtype)
    if weights.ndim == 2:
        return torch.einsum("bk,bk...->k...", weights.to(dtype), values.to(dtype))
    return torch.mm(weights.to(dtype).unsqueeze(0), flat(values.to(dtype))).view(values.shape[1:])


def second_moment(values: Tensor, weights: Tensor | None, dtype: torch.dtype, center: Tensor | None) -> Tensor:
    """Return Σ wᵢ (gᵢ − center)², elementwise ``[*shape]``, accumulated in ``dtype``."""
    given = [x for x in (values, weights, center) if x is not None]
    if not tracing.are_plain(given):
        deviations = values.to(dtype) if center is None else values.to(dtype) - center
        return weighted_sum(deviations * deviations, weights, dtype)
    deviations = values.to(dtype, copy=True)  # the one temporary of this size
    if center is not None:
        deviations.sub_(center)
    return weighted_sum(deviations.mul_(deviations), weights, dtype)


def gram(values: Tensor, others: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return ⟨gᵢ, hⱼ⟩, ``[B, B']``, in ``dtype``, by default float32 at least; converted a few columns at a time."""
    dtype = gram_dtype(values.dtype, others.dtype) if dtype is None else dtype
    rows = flat(values)
    others = rows if others is values else flat(others)
    if rows.dtype == others.dtype == dtype:
        return rows @ others.T
    width = rows.shape[1]
    step = cost_model.rows_per_block(width, max(len(rows), len(others)), rows.device, _CONVERTED)

    def products() -> Iterator[Tensor]:
        for start in range(0, max(width, 1), step):
            block = rows[:, start : start + step].to(dtype)
            yield block @ (block if others is rows else others[:, start : start + step].to(dtype)).T

    return functools.reduce(Tensor.add_, products())


def gram_dtype(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the dtype in which inner products of gradients of two dtypes are taken by default."""
    return dtypes.accumulate_dtype(torch.promote_types(one, other))


def project(values: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return ``left[j]ᵀ gᵢ right[j]``, ``[B, K]``, in float32 at least."""
    rows = flat(values.to(dtypes.accumulate_dtype(values.dtype)))
    matrices = rows.view(len(rows), left.shape[1], right.shape[1])
    if left.shape[1] > right.shape[1]:  # the longer axis is multiplied first, which leaves less
        matrices, left, right = matrices.mT, right, left
    products = matrices.flatten(0, 1) @ right.to(rows.dtype).T  # of three axes, torch would copy the signs
    return (products.view(len(rows), left.shape[1], len(left)) * left.to(rows.dtype).T).sum(1)


def per_sample(x: Tensor, like: Tensor) -> Tensor:
    """Return a view of ``x [B]``, or ``[B, K]``, that broadcasts along the other axes of ``like [B, ...]``."""
    return x.view(-1, *x.shape[1:], *[1] * (like.ndim - x.ndim))


def flat(values: Tensor) -> Tensor:
    """Return gradients ``[B, *shape]`` as rows, ``[B, P]``."""
    # A reshape takes as long as a small product; -1 is ambiguous where B = 0.
    return values if values.ndim == 2 else values.reshape(values.shape[0], values.shape[1:].numel())
