"""Images: ``F.affine_grid``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample.vmap_rules.batched import is_batched


def _affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    """Multiply the positions of all pixels, each in [-1, 1], by the affine maps."""
    axes = len(size) - 2
    is_image = isinstance(size, tuple | list) and axes in {2, 3} and min(size) > 0
    fits = is_image and theta.is_floating_point() and theta.shape == (size[0], axes, axes + 1)
    if not (fits and is_batched(theta)):
        return F.affine_grid(theta, size, align_corners)  # type: ignore[arg-type]
    steps = [_positions(n, theta, align_corners=bool(align_corners)) for n in size[2:]]
    places = torch.meshgrid(*steps, indexing="ij")[::-1]  # x comes first
    positions = torch.stack([*places, torch.ones_like(places[0])], -1)
    return (positions.view(1, -1, axes + 1) @ theta.mT).view(size[0], *size[2:], axes)


def _positions(count: int, like: Tensor, *, align_corners: bool) -> Tensor:
    if count == 1:
        return like.new_zeros(1)
    ends = 1.0 if align_corners else (count - 1) / count
    return torch.linspace(-ends, ends, count, dtype=like.dtype, device=like.device)


RULES: dict[Any, Callable[..., Any]] = {F.affine_grid: _affine_grid}
