"""Convolutions of the images of all samples, which report to a callback instead of to their kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from persample.engines.layers.rows import Callback


class Geometry(NamedTuple):
    """How a kernel is moved over images, one number per spatial axis: the settings of ``aten.convolution``.

    Attributes:
        stride: the distance of neighbouring places of the kernel.
        padding: zeros on both sides.
        dilation: the distance of neighbouring entries of the kernel.
        transposed: whether images and output change places.
        output_padding: what a transposed convolution adds to the size of its output.
        groups: the number of groups of channels.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


def geometry_of(
    kernel: Tensor, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Geometry | None:
    """Return the geometry that ``F.conv2d`` and its like are given, or None if the two sides are padded unequally."""
    sizes = kernel.shape[2:]
    strides, dilations = (_per_axis(x, len(sizes)) for x in (stride, dilation))
    if isinstance(padding, str):
        total = [apart * (size - 1) * (padding == "same") for apart, size in zip(dilations, sizes, strict=True)]
        if any(x % 2 for x in total):
            return None
        padding = [x // 2 for x in total]
    return Geometry(strides, _per_axis(padding, len(sizes)), dilations, False, (0,) * len(sizes), groups)


def transposed_geometry_of(  # noqa: PLR0917 - as torch's
    kernel: Tensor, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1
) -> Geometry | None:
    """Return the geometry that ``F.conv_transpose2d`` and its like are given.

    None if the output is padded by a whole stride: a convolution of the output would be larger than the images.
    """
    settings = (_per_axis(x, kernel.ndim - 2) for x in (stride, padding, dilation, output_padding))
    stride, padding, dilation, output_padding = settings
    fits = all(pad < step for pad, step in zip(output_padding, stride, strict=True))
    return Geometry(stride, padding, dilation, True, output_padding, groups) if fits else None


def _per_axis(x: Any, axes: int) -> tuple[int, ...]:
    values = tuple(map(int, x if isinstance(x, Sequence) else (x,)))  # numbers of NumPy, too
    return values * axes if len(values) == 1 else values


class _ConvolvedImages(Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - as autograd calls it
        ctx: Any,
        images: Tensor,
        kernel: Tensor,
        bias: Tensor | None,
        convolve: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        geometry: Geometry,
        callback: Callback,
    ) -> Tensor:
        ctx.save_for_backward(images, kernel)
        ctx.geometry, ctx.callback = geometry, callback
        return convolve(images, kernel, bias)

    @staticmethod
    def backward(ctx: Any, signals: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        images, kernel = (x.detach() for x in ctx.saved_tensors)
        ctx.callback(signals, images)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None, None
        wanted = True, False, False
        grad = torch.ops.aten.convolution_backward(signals, images, kernel, None, *ctx.geometry, wanted)[0]
        return grad, None, None, None, None, None


# Passes no gradient to the kernel and bias, so that a gradient there comes from another use of them.
convolved_images: Callable[..., Tensor] = _ConvolvedImages.apply
