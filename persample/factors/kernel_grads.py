"""The gradients of convolution kernels by the convolutions that compute them in a backward pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def kernel_grad(signals: Tensor, images: Tensor, shape: Sequence[int], geometry: tuple[Any, ...]) -> Tensor:
    """Return the gradient of one kernel from signals ``[N, O, *out]`` and images ``[N, C, *in]``."""
    kernel = images.new_empty(shape)  # only its shape is read; an expanded tensor would be copied
    *steps, groups = geometry
    settings = (*steps, False, (0,) * len(steps[0]), groups)
    return torch.ops.aten.convolution_backward(signals, images, kernel, None, *settings, (False, True, False))[1]


def kernel_grads(  # noqa: PLR0917 - as torch's
    signals: Tensor,
    images: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Return the gradients ``[B, *shape]`` of each sample, by one convolution with B times as many groups."""
    size = len(signals)
    signals, images = (x.transpose(0, 1).flatten(1, 2) for x in (signals, images))
    geometry = stride, padding, dilation, size * groups
    grads = kernel_grad(signals, images, (size * shape[0], *shape[1:]), geometry)
    return grads.view(size, *shape)


@functools.cache
def kernel_grads_for_any_size() -> Any:
    """Return the same as an operation that programs for any B call: Inductor fixes the number of groups of its own."""
    own = torch.library.custom_op("persample::kernel_grads", kernel_grads, mutates_args=())
    own.register_fake(lambda signals, images, shape, *_: images.new_empty((signals.shape[0], *shape)))
    return own
