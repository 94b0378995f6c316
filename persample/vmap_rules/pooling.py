"""Pooling: ``F.max_unpool1d``, ``F.max_unpool2d`` and ``F.max_unpool3d``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample._torch import unpool_output_size


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
    F.max_unpool1d: functools.partial(_max_unpool, F.max_unpool1d, 1),
    F.max_unpool2d: functools.partial(_max_unpool, F.max_unpool2d, 2),
    F.max_unpool3d: functools.partial(_max_unpool, F.max_unpool3d, 3),
}
