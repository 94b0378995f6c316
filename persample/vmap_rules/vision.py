"""Images: ``F.affine_grid``, ``F.max_unpool1d``, ``F.max_unpool2d`` and ``F.max_unpool3d``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample._torch import unpool_output_size
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


def _max_unpool(  # noqa: PLR0917 - as torch's
    function: Callable[..., Tensor],
    axes: int,
    input: Tensor,  # noqa: A002
    indices: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    output_size: Any = None,
) -> Tensor:
    fits = input.shape == indices.shape and input.ndim - axes in {1, 2} and indices.dtype == torch.long
    if not fits or not input.numel():
        return function(input, indices, kernel_size, stride, padding, output_size)  # raises
    kernel, step, pad = (_per_axis(x, axes) for x in (kernel_size, kernel_size if stride is None else stride, padding))
    size = unpool_output_size(input, kernel, step, pad, output_size)
    flat = input.new_zeros(*input.shape[:-axes], torch.Size(size).numel())
    return flat.scatter(-1, indices.flatten(-axes), input.flatten(-axes)).unflatten(-1, size)


def _per_axis(x: Any, axes: int) -> list[int]:
    return [x] * axes if isinstance(x, int) else list(x)


RULES: dict[Any, Callable[..., Any]] = {
    F.affine_grid: _affine_grid,
    F.max_unpool1d: functools.partial(_max_unpool, F.max_unpool1d, 1),
    F.max_unpool2d: functools.partial(_max_unpool, F.max_unpool2d, 2),
    F.max_unpool3d: functools.partial(_max_unpool, F.max_unpool3d, 3),
}
