"""Inner products of all pairs of patches that a convolution cuts out of one sample, without cutting them out."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def both_sides(padding: Sequence[int]) -> list[int]:
    """Return the padding of spatial axes as ``F.pad`` takes it: the last axis first, each side by itself."""
    return [side for sides in reversed(padding) for side in (sides, sides)]


def pixel_products(images: Tensor) -> Tensor:
    """Return the inner products ``[B, G, N, *in, N, *in]`` of all pairs of pixels of images ``[B, G, C, N, *in]``."""
    pixels, columns = images.shape[3:], images.flatten(3)
    return (columns.mT @ columns).unflatten(3, pixels).unflatten(2, pixels)


def patch_products(
    images: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Return ⟨pₛ, pₜ⟩ for all places s and t that the kernel is applied to.

    The inner product of two patches is the sum of those of their pixels, so every pair of pixels is multiplied once,
    and not once per offset in the kernel. Those with pixels of the padding are zero: they are added afterwards. The
    offsets along one axis are summed after those along the axis before, so they add up and do not multiply.

    Args:
        images: images without padding ``[B, G, C, N, *in]``, C channels in each group.
        kernel: the size of the kernel along each spatial axis.
        stride: one number per spatial axis.
        padding: zeros on both sides, one number per spatial axis.
        dilation: one number per spatial axis.

    Returns:
        The inner products ``[B, G, N, *out, N, *out]``.
    """
    products, sides = pixel_products(images), both_sides(padding)
    if any(padding):
        products = pad(products, [*sides, 0, 0, *sides])
    for axis, (taps, step, apart) in enumerate(zip(kernel, stride, dilation, strict=True), 3):
        rest = (slice(None),) * len(kernel)  # the axes between those of the two pixels
        last = products.shape[axis] - (taps - 1) * apart
        windows = (slice(start, start + last, step) for start in range(0, taps * apart, apart))
        of_pairs = (products[(slice(None),) * axis + (window, *rest, window)] for window in windows)
        products = functools.reduce(torch.add, of_pairs)
    return products
