"""Gradients of convolution kernels, stored as signals and images; patches are cut out only where needed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from persample.factors import contractions, cost_model
from persample.factors.base import Factor, row_format
from persample.factors.layout import Layout
from persample.factors.outer import Outer
from persample.utils import dtypes

_convolve = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


@dataclass(frozen=True)
class Conv(Factor):
    """Per-sample gradients of a kernel ``[O, C/groups, *k]``, for N images in each sample.

    A transposed convolution is the same with signals and inputs exchanged. The first axis may be several, with as many
    channels: the gradients ``[K, O, C, *k]`` of K outputs have K·O.

    Args:
        signals: back-propagated signals, ``[B, N, O, *out]``.
        inputs: ``[B, N, C, *in]``.
        kernel_shape: ``[O, C/groups, *k]``, or ``[K, O, C, *k]``.
        stride: one number per spatial axis.
        padding: zeros on both sides, one number per spatial axis.
        dilation: one number per spatial axis.
        groups: the number of groups of channels.

    Examples:
        >>> signals, inputs = torch.ones(2, 1, 1, 3), torch.ones(2, 1, 1, 4)
        >>> Conv(signals, inputs, (1, 1, 2), (1,), (0,), (1,), 1).materialize()[0]
        tensor([[[3., 3.]]])
    """

    signals: Tensor
    inputs: Tensor
    kernel_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel."""
        return self.kernel_shape

    @property
    def num_terms(self) -> int:
        """T, the number of places that the kernel is applied to in one sample."""
        return self.signals.shape[1] * prod(self.signals.shape[3:])

    @property
    def operands(self) -> int:
        """The number of elements in the signals and patches of all samples."""
        channels, *kernel = self._kernel
        return len(self) * self.num_terms * (channels + self.groups * prod(kernel))

    @property
    def _kernel(self) -> tuple[int, ...]:
        """The shape of the kernel with one axis of channels."""
        axis = len(self.shape) - len(self.stride) - 1
        return (prod(self.shape[:axis]), *self.shape[axis:])

    def patches(self) -> Outer:
        """Return the same gradients as outer products of signals and patches of the images."""
        axes = range(len(self.stride))
        sides = [side for axis in reversed(axes) for side in [self.padding[axis]] * 2]
        patches = pad(self.inputs, sides)
        for axis in axes:
            size, dilation = self._kernel[2 + axis], self.dilation[axis]
            patches = patches.unfold(3 + axis, (size - 1) * dilation + 1, self.stride[axis])[..., ::dilation]
        # [B, N, C, *out, *k] and [B, N, O, *out] become [B, G, N·out, …]
        channels, kernel = self.shape[: -len(axes) - 1], prod(self._kernel[1:])
        split = patches.flatten(3, 2 + len(axes)).flatten(4).unflatten(2, (self.groups, -1))
        right = split.permute(0, 2, 1, 4, 3, 5).reshape(len(self), self.groups, self.num_terms, kernel)
        signals = self.signals.flatten(3).unflatten(2, (self.groups, -1))
        left = signals.permute(0, 2, 1, 4, 3).reshape(len(self), self.groups, self.num_terms, -1)
        groups = (self.groups,) if self.groups > 1 else ()
        rows = (channels[0] // self.groups,) if groups else channels
        layout = Layout(groups, rows, (kernel,), tuple(range(len(groups) + len(rows) + 1)), self.shape)
        return Outer(left, right, layout, self.dtype)

    def materialize(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients, ``[B, *shape]``."""
        each = kernel_grads() if cost_model.is_for_any_size() else _kernel_grads
        grads = each(self.signals, self.inputs, self._kernel, *self._geometry).view(len(self), *self.shape)
        return grads if out is None else out.copy_(grads)

    def scale_rows(self, scale: Tensor) -> Outer:
        """Return the factor of sᵢ gᵢ for ``scale [B]``, in float32 at least."""
        return self.patches().scale_rows(scale)

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖², ``[B]`` float64."""
        return self.patches().squared_norms() if self._squares_by_inner_products else super().squared_norms()

    @property
    def _squares_by_inner_products(self) -> bool:
        return cost_model.inner_products_are_faster(self.size)

    def weighted_sum(self, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return Σ wᵢ gᵢ, ``[*shape]``, by the convolution that computes the batch gradient, on scaled signals."""
        signals = self.signals if weights is None else dtypes.scaled_rows(self.signals, weights, dtype)
        images, signals = self.inputs.flatten(0, 1).to(dtype), signals.flatten(0, 1).to(dtype)
        return _kernel_grad(signals, images, self._kernel, self._geometry).view(self.shape)

    @property
    def _geometry(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
        return self.stride, self.padding, self.dilation, self.groups

    def gram(self, other: Factor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return ⟨gᵢ, hⱼ⟩, ``[B, B']``."""
        return self.patches().gram(other.patches() if isinstance(other, Conv) else other, dtype)

    def dot(self, directions: Tensor) -> Tensor:
        """Return ⟨gᵢ, dₖ⟩, ``[B, K]``: the signals times the convolution of the images with each direction."""
        dtype = dtypes.accumulate_dtype(self.dtype)
        images, signals = self.inputs.flatten(0, 1).to(dtype), self.signals.to(dtype)
        settings = (None, self.stride, self.padding, self.dilation, self.groups)
        columns = []
        for kernel in directions.to(dtype).reshape(-1, *self._kernel):
            outputs = _convolve[len(self.stride)](images, kernel, *settings).view(signals.shape)
            columns.append((signals * outputs).flatten(1).sum(1))
        return torch.stack(columns, 1)

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ``left[j]ᵀ gᵢ right[j]``, ``[B, K]``."""
        return self.patches().project(left, right)

    def outputs(self) -> Sequence[Factor]:
        """Return the factors of g₁ … g_K where one gradient is the stack ``[K, *shape]``; they share images."""
        signals = self.signals.unflatten(2, (self.shape[0], -1)).unbind(2)
        return [replace(self, signals=x, kernel_shape=self.shape[1:]) for x in signals]

    def scale_outputs(self, scale: Tensor, dtype: torch.dtype) -> Conv:
        """Return the factor of sₖ gₖ for gradients ``[K, *shape]`` and ``scale [B, K]``: the signals are scaled."""
        signals = contractions.scaled_along(self.signals, 2, scale, dtype)
        return replace(self, signals=signals, inputs=self.inputs.to(dtype))

    def squared_norms_of_outputs(self) -> Tensor:
        """Return ‖gₖ‖² for gradients ``[K, *shape]``, ``[B, K]`` float64."""
        inner = self._squares_by_inner_products
        return self.patches().squared_norms_of_outputs() if inner else super().squared_norms_of_outputs()

    @classmethod
    def concatenate(cls, factors: Sequence[Conv]) -> Factor | None:
        """Return the factor of the samples of all, of patches where the sizes of images differ."""
        joined = super().concatenate(factors)
        return Outer.concatenate([factor.patches() for factor in factors]) if joined is None else joined

    def add(self, other: Factor) -> Factor | None:
        """Return the factor of gᵢ + hᵢ: of more images, or of more patches where the sizes of images differ."""
        if not isinstance(other, Conv):
            return None
        if row_format(self) != row_format(other):
            return self.patches().add(other.patches())
        signals, inputs = (torch.cat(pair, 1) for pair in zip(self.tensors, other.tensors, strict=True))
        return replace(self, signals=signals, inputs=inputs)


def _kernel_grad(signals: Tensor, images: Tensor, shape: Sequence[int], geometry: tuple[Any, ...]) -> Tensor:
    """Return the gradient of one kernel from signals ``[N, O, *out]`` and images ``[N, C, *in]``."""
    kernel = images.new_empty(shape)  # only its shape is read; an expanded tensor would be copied
    *steps, groups = geometry
    settings = (*steps, False, (0,) * len(steps[0]), groups)
    return torch.ops.aten.convolution_backward(signals, images, kernel, None, *settings, (False, True, False))[1]


def _kernel_grads(  # noqa: PLR0917 - as torch's
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
    grads = _kernel_grad(signals, images, (size * shape[0], *shape[1:]), geometry)
    return grads.view(size, *shape)


@functools.cache
def kernel_grads() -> Any:
    """Return the same as an operation that programs for any B call: Inductor fixes the number of groups of its own."""
    own = torch.library.custom_op("persample::kernel_grads", _kernel_grads, mutates_args=())
    own.register_fake(lambda signals, images, shape, *_: images.new_empty((signals.shape[0], *shape)))
    return own
