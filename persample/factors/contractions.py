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


def has_few_columns(left: Tensor, right: Tensor) -> bool:
    """Return whether ``left.mT @ right`` is better computed as its transpose."""
    few = _FEW_COLUMNS_OF_MANY_TERMS if left.shape[-2] >= _MANY_TERMS else _FEW_COLUMNS
    return left.device.type == "cpu" and right.shape[-1] <= few < left.shape[-1]


def weighted_sum(values: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return Σ wᵢ gᵢ, ``[*shape]``, accumulated in ``dtype``."""
    if weights is None:
        return values.sum(0, dtype=dtype)
    return torch.mm(weights.to(dtype).unsqueeze(0), _as_rows(values, dtype)).view(values.shape[1:])


def second_moment(values: Tensor, weights: Tensor | None, dtype: torch.dtype, center: Tensor | None) -> Tensor:
    """Return Σ wᵢ (gᵢ − center)², elementwise ``[*shape]``, accumulated in ``dtype``."""
    given = [x for x in (values, weights, center) if x is not None]
    if any(tracing.is_recorded(x) or tracing.is_traced(x) for x in given):
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
    rows = _as_rows(values, dtypes.accumulate_dtype(values.dtype))
    matrices = rows.view(len(rows), left.shape[1], right.shape[1])
    if left.shape[1] > right.shape[1]:  # the longer axis is multiplied first, which leaves less
        matrices, left, right = matrices.mT, right, left
    products = matrices.flatten(0, 1) @ right.to(rows.dtype).T  # of three axes, torch would copy the signs
    return (products.view(len(rows), left.shape[1], len(left)) * left.to(rows.dtype).T).sum(1)


def per_sample(x: Tensor, like: Tensor) -> Tensor:
    """Return a view of ``x [B]`` that broadcasts along the other axes of ``like [B, ...]``."""
    return x.view(-1, *[1] * (like.ndim - 1))


def scaled_along(x: Tensor, axis: int, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x times ``scale [B, K]``, in a dtype, where an axis of x merges K with what comes after it."""
    split = x.to(dtype).unflatten(axis, (scale.shape[1], -1))
    shape = (len(scale), *[1] * (axis - 1), scale.shape[1], *[1] * (split.ndim - axis - 1))
    return (split * scale.to(dtype).view(shape)).flatten(axis, axis + 1)


def _as_rows(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradients as the rows of one matrix, ``[B, P]``."""
    return flat(values.to(dtype))


def flat(values: Tensor) -> Tensor:
    """Return gradients ``[B, *shape]`` as rows, ``[B, P]``."""
    # A reshape takes as long as a small product; -1 is ambiguous where B = 0.
    return values if values.ndim == 2 else values.reshape(values.shape[0], values.shape[1:].numel())
