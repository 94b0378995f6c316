"""Inner products of all pairs of patches that a convolution cuts out of one sample, without cutting them out."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def patch_products(images: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Return ⟨pₛ, pₜ⟩ for all places s and t that the kernel is applied to.

    The inner product of two patches is the sum of those of their pixels, so every pair of pixels is multiplied once,
    and not once per offset in the kernel.

    Args:
        images: padded images ``[B, G, N, *in, C]``, the channels of each group last.
        kernel: the size of the kernel along each spatial axis.
        stride: one number per spatial axis.
        dilation: one number per spatial axis.

    Returns:
        The inner products ``[B, G, T, T]`` of T = N·out places.
    """
    pixels = images.shape[2:-1]
    rows = images.flatten(2, -2)
    products = (rows @ rows.mT).unflatten(3, pixels).unflatten(2, pixels)
    windows = (
        tuple(
            slice(start * apart, start * apart + (size - (taps - 1) * apart - 1) // step * step + 1, step)
            for start, size, taps, step, apart in zip(offset, pixels[1:], kernel, stride, dilation, strict=True)
        )
        for offset in itertools.product(*map(range, kernel))
    )
    every = slice(None)
    of_pairs = (products[(every, every, every, *window, every, *window)] for window in windows)
    total = functools.reduce(torch.add, of_pairs)
    return total.flatten(3 + len(kernel)).flatten(2, 2 + len(kernel))
