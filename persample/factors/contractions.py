"""Contractions of gradients that are written out, ``[B, *shape]``: the defaults of all factors."""

from __future__ import annotations

import torch
from torch import Tensor

from persample.utils import dtypes

# For so few columns MKL takes up to 5 times as long as for as many rows (measured, torch 2.13, AMD EPYC).
_FEW_COLUMNS = 8


def sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left.mT @ right``, ``[..., o, i]`` from ``[..., T, o]`` and ``[..., T, i]``."""
    multiply = torch.mm if left.ndim == 2 else torch.matmul
    if left.device.type == "cpu" and right.shape[-1] <= _FEW_COLUMNS < left.shape[-1]:
        return multiply(right.mT, left).mT.contiguous()
    return multiply(left.mT, right)


def weighted_sum(values: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return Σ wᵢ gᵢ, ``[*shape]``, accumulated in ``dtype``."""
    if weights is None:
        return values.sum(0, dtype=dtype)
    return torch.mm(weights.to(dtype).unsqueeze(0), _as_rows(values, dtype)).view(values.shape[1:])


def second_moment(values: Tensor, weights: Tensor | None, dtype: torch.dtype, center: Tensor | None) -> Tensor:
    """Return Σ wᵢ (gᵢ − center)², elementwise ``[*shape]``, accumulated in ``dtype``."""
    deviations = values.to(dtype, copy=True)  # the one temporary of this size
    if center is not None:
        deviations.sub_(center)
    return weighted_sum(deviations.mul_(deviations), weights, dtype)


def gram(values: Tensor, others: Tensor) -> Tensor:
    """Return ⟨gᵢ, hⱼ⟩, ``[B, B']``, in float32 at least."""
    dtype = dtypes.accumulate_dtype(torch.promote_types(values.dtype, others.dtype))
    rows = _as_rows(values, dtype)
    return rows @ (rows if others is values else _as_rows(others, dtype)).T


def project(values: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return ``left[j]ᵀ gᵢ right[j]``, ``[B, K]``, in float32 at least."""
    rows = _as_rows(values, dtypes.accumulate_dtype(values.dtype))
    matrices = rows.view(len(rows), left.shape[1], right.shape[1])
    return torch.einsum("bok,ko->bk", matrices @ right.to(rows.dtype).T, left.to(rows.dtype))


def per_sample(x: Tensor, like: Tensor) -> Tensor:
    """Return a view of ``x [B]`` that broadcasts along the other axes of ``like [B, ...]``."""
    return x.view(-1, *[1] * (like.ndim - 1))


def _as_rows(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradients as the rows of one matrix, ``[B, P]``."""
    rows = values.to(dtype)
    return rows.reshape(rows.shape[0], rows.shape[1:].numel())  # -1 is ambiguous where B = 0
