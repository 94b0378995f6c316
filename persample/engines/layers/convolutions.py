"""The geometry of convolutions: what the gradient of a kernel needs to know beside signals and images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


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
