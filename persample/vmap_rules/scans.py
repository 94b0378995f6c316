"""Running products: ``torch.cumprod``, whose derivative torch.func computes sample by sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:  # noqa: A002
    """Multiply by doubling: after k rounds a product has up to 2ᵏ factors. Nothing is divided, so zeros may occur."""
    kind = input.dtype if dtype is None else dtype
    if not input.ndim or not (kind.is_floating_point or kind.is_complex):
        return torch.cumprod(input, dim, dtype=dtype)
    product, size = input.to(kind), input.shape[dim]
    step = 1
    while step < size:
        later = product.narrow(dim, step, size - step) * product.narrow(dim, 0, size - step)
        product = torch.cat([product.narrow(dim, 0, step), later], dim)
        step *= 2
    return product.clone() if size < 2 else product


RULES: dict[Any, Callable[..., Any]] = {
    torch.cumprod: _cumprod,
    Tensor.cumprod: _cumprod,
}
