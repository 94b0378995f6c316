"""Running products: ``torch.cumprod``, whose derivative torch.func computes sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from persample.utils.dtypes import is_autocast
from persample.vmap_rules.kernel_call import call_kernel


def _cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:  # noqa: A002
    kind = input.dtype if dtype is None else dtype
    known = isinstance(dim, int) and -input.ndim <= dim < input.ndim and kind.is_floating_point
    if not known or not input.is_floating_point() or is_autocast(input.device):
        return torch.cumprod(input, dim, dtype=dtype)
    axis = dim % input.ndim - input.ndim  # axes of samples come in front
    return call_kernel(partial(_kernel, axis), partial(_gradients, axis), input.to(kind))


def _kernel(axis: int, x: Tensor) -> tuple[Tensor]:
    return (torch.cumprod(x, axis),)


def _gradients(axis: int, _: Sequence[bool], grad: Tensor, x: Tensor, product: Tensor) -> tuple[Tensor]:
    """Return Σ_{j ≥ k} ∂_j Π_{i ≤ j, i ≠ k} x_i: the sum of later ∂_j y_j, over x_k.

    At the first zero of x, the products are those with 1 in its place; behind it they are all 0.
    """
    zeros = (x == 0).cumsum(axis)
    is_first = (x == 0) & (zeros == 1)
    before = _sum_of_later(grad * product, axis) / torch.where(x == 0, 1, x)
    at_first = _sum_of_later(grad * torch.cumprod(torch.where(is_first, 1, x), axis), axis)
    return (torch.where(is_first, at_first, torch.where(zeros > 0, 0, before)),)


def _sum_of_later(x: Tensor, axis: int) -> Tensor:
    return x.flip(axis).cumsum(axis).flip(axis)


FIRST_DERIVATIVE_RULES: dict[Any, Callable[..., Any]] = {torch.cumprod: _cumprod, Tensor.cumprod: _cumprod}
