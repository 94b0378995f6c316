"""``torch.cdist``: where all samples share the rows, torch.func returns the gradient of sample 0 for all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from persample._torch import aten_cdist_backward, aten_cdist_forward
from persample.utils.dtypes import full_precision, in_single_precision, is_autocast
from persample.vmap_rules.kernel_call import call_kernel

# torch computes Euclidean distances by a matrix product if asked to, and of as many rows as these by default.
_PRODUCT_FROM, _PRODUCT, _NO_PRODUCT = 26, "use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist"
_IF_MANY = "use_mm_for_euclid_dist_if_necessary"


def _cdist(
    distances: Callable[[Tensor, Tensor, float], Tensor],
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    compute_mode: str = _IF_MANY,
) -> Tensor:
    if p < 0 or not _fits(x1, x2, compute_mode) or _is_product(x1, x2, p, compute_mode):
        return torch.cdist(x1, x2, p, compute_mode)  # raises, or is composed of operations that vmap batches rightly
    if is_autocast(x1.device):  # tensors are cast here: torch.func differentiates no kernel under autocast
        with full_precision(x1.device):
            return _cdist(distances, in_single_precision(x1), in_single_precision(x2), p, compute_mode)
    lead = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    return distances(x1.expand(*lead, *x1.shape[-2:]), x2.expand(*lead, *x2.shape[-2:]), p)


def _fits(x1: Tensor, x2: Tensor, compute_mode: str) -> bool:
    alike = x1.dtype == x2.dtype or is_autocast(x1.device)
    floats = alike and x1.is_floating_point() and x2.is_floating_point()
    known = compute_mode in {_PRODUCT, _NO_PRODUCT, _IF_MANY} and min(x1.ndim, x2.ndim) > 1
    return floats and known and x1.shape[-1] == x2.shape[-1] and x1.numel() * x2.numel() > 0


def _is_product(x1: Tensor, x2: Tensor, p: float, compute_mode: str) -> bool:
    many = max(x1.shape[-2], x2.shape[-2]) >= _PRODUCT_FROM
    return p == 2 and (compute_mode == _PRODUCT or (many and compute_mode != _NO_PRODUCT))


def _by_kernel(x1: Tensor, x2: Tensor, p: float) -> Tensor:
    return call_kernel(functools.partial(_kernel, p=p), functools.partial(_gradients, p=p), x1, x2)


def _kernel(x1: Tensor, x2: Tensor, p: float) -> tuple[Tensor]:
    return (aten_cdist_forward(x1, x2, p, 2),)


def _gradients(
    _needed: Any, grad: Tensor, x1: Tensor, x2: Tensor, distances: Tensor, p: float
) -> tuple[Tensor, Tensor]:
    grad, x1, x2 = grad.contiguous(), x1.contiguous(), x2.contiguous()
    of_second = aten_cdist_backward(grad.mT.contiguous(), x2, x1, p, distances.mT.contiguous())
    return aten_cdist_backward(grad, x1, x2, p, distances), of_second


def _composed(x1: Tensor, x2: Tensor, p: float) -> Tensor:
    difference = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    nan = torch.where(difference.isnan(), difference, 0)
    if not p:  # the number of entries that differ; ceil has a gradient of 0
        return (nan + (difference != 0)).ceil().sum(-1)
    if p == 1:  # the kernel's gradient of NaN is NaN, that of abs is 0
        return (difference.abs() + nan.square()).sum(-1)
    if p != torch.inf:
        return torch.linalg.vector_norm(difference, p, -1)
    # The kernel takes the largest number, passes the whole gradient to each entry that is as large, and NaN to what is
    # no finite number: a square root has this gradient at 0.
    entries = difference.abs()
    finite = entries.isfinite()
    largest = torch.where(entries.isnan(), 0, entries).detach().amax(-1, keepdim=True)
    none = torch.where(finite, 0, entries).nan_to_num(0, 0).sqrt()
    return largest.squeeze(-1) + torch.where(finite, (entries - entries.detach()) * (entries == largest), none).sum(-1)


RULES: dict[Any, Callable[..., Any]] = {torch.cdist: functools.partial(_cdist, _composed)}
FIRST_DERIVATIVE_RULES: dict[Any, Callable[..., Any]] = {torch.cdist: functools.partial(_cdist, _by_kernel)}
