"""Writing at places: filling rows with a sample's own value, selecting by a mask, undoing a pooling."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample._torch import unpool_output_size


def _index_fill(input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:  # noqa: A002
    # torch.func fills a tensor that all samples share with the last sample's value.
    if not _fits(input, dim, value):
        return torch.index_fill(input, dim, index, value)  # of a number, or raises
    return torch.where(_filled(input, dim, index), value.to(input.dtype), input)


def _index_fill_in_place(input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:  # noqa: A002
    if not _fits(input, dim, value):
        return input.index_fill_(dim, index, value)
    return input.copy_(torch.where(_filled(input, dim, index), value.to(input.dtype), input))


def _fits(x: Tensor, dim: Any, value: Any) -> bool:
    scalar = isinstance(value, Tensor) and not value.ndim and (x.is_complex() or not value.is_complex())
    axes = max(x.ndim, 1)
    return scalar and isinstance(dim, int) and -axes <= dim < axes


def _filled(x: Tensor, dim: int, index: Tensor) -> Tensor:
    # Which places an index names, a mask as of x but of size 1 along other axes.
    shape = [1] * x.ndim
    if shape:
        shape[dim] = x.shape[dim]
    rows = torch.zeros(shape[dim] if shape else 1, dtype=torch.bool, device=x.device)
    return rows.index_fill(0, index, True).view(shape)


def _masked_select(input: Tensor, mask: Tensor) -> Tensor:  # noqa: A002
    shape = torch.broadcast_shapes(input.shape, mask.shape)  # torch.func's gradient does not undo the broadcasting
    return torch.masked_select(input.expand(shape), mask.expand(shape))


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


FILLING: dict[Any, Callable[..., Any]] = {
    torch.index_fill: _index_fill,
    Tensor.index_fill: _index_fill,
    Tensor.index_fill_: _index_fill_in_place,
    torch.masked_select: _masked_select,
    Tensor.masked_select: _masked_select,
    F.max_unpool1d: functools.partial(_max_unpool, F.max_unpool1d, 1),
    F.max_unpool2d: functools.partial(_max_unpool, F.max_unpool2d, 2),
    F.max_unpool3d: functools.partial(_max_unpool, F.max_unpool3d, 3),
}
