"""The gradients of convolution kernels by the convolutions that compute them in a backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def kernel_grad(signals: Tensor, images: Tensor, shape: Sequence[int], geometry: tuple[Any, ...]) -> Tensor:
    """Return the gradient of one kernel from signals ``[N, O, *out]`` and images ``[N, C, *in]``."""
    kernel = images.new_empty(shape)  # only its shape is read; an expanded tensor would be copied
    *steps, groups = geometry
    if images.shape[2:].numel() == 1:  # torch rejects such an image if its strides are those of a slice
        images = images.flatten(1).view(images.shape)
    settings = (*steps, False, (0,) * len(steps[0]), groups)
    return torch.ops.aten.convolution_backward(signals, images, kernel, None, *settings, (False, True, False))[1]


def kernel_grads(signals: Tensor, images: Tensor, shape: Sequence[int], geometry: tuple[Any, ...]) -> Tensor:
    """Return the gradients ``[B, *shape]`` of each sample, by one convolution with B times as many groups."""
    size, (*steps, groups) = len(signals), geometry
    signals, images = (x.transpose(0, 1).flatten(1, 2) for x in (signals, images))
    grads = kernel_grad(signals, images, (size * shape[0], *shape[1:]), (*steps, size * groups))
    return grads.view(size, *shape)
