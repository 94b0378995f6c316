"""Gradients of convolution kernels, stored as signals and images; patches are cut out only where needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from persample.factors import contractions, cost_model
from persample.factors.base import Factor, row_format
from persample.factors.kernel_grads import kernel_grad, kernel_grads
from persample.factors.layout import Layout
from persample.factors.outer import Outer
from persample.factors.patch_products import both_sides, patch_products, pixel_products
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
    def size(self) -> cost_model.Size:
        """The sizes by which the cost model estimates times, with inner products of pixels where these are fewer."""
        size = super().size
        if not self._multiplies_pixels:
            return size
        terms, signals, images = self.num_terms, self._kernel[0], self.inputs.shape[2]
        products = terms**2 * signals + self._pixels**2 * images
        read = terms * signals + self._pixels * images + terms**2 * sum(self._kernel[2:]) * self.groups
        return cost_model.Size(*size[:5], inner=(len(self) * products, len(self) * read))

    @property
    def _pixels(self) -> int:
        """The number of pixels of the images of one sample."""
        return self.inputs.shape[1] * prod(self.inputs.shape[3:])

    @property
    def _multiplies_pixels(self) -> bool:
        """Whether all pairs of pixels are fewer than all pairs of patches times the offsets in the kernel."""
        return self._pixels**2 <= prod(self._kernel[2:]) * self.num_terms**2

    @property
    def _kernel(self) -> tuple[int, ...]:
        """The shape of the kernel with one axis of channels."""
        axis = len(self.shape) - len(self.stride) - 1
        return (prod(self.shape[:axis]), *self.shape[axis:])

    def patches(self) -> Outer:
        """Return the same gradients as outer products of signals and patches of the images."""
        axes = range(len(self.stride))
        patches = pad(self.inputs, both_sides(self.padding))
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
        if self.signals.device.type != "cpu":  # cuDNN computes many groups one after the other
            return self.patches().materialize(out)
        grads = kernel_grads(self.signals, self.inputs, self._kernel, self._geometry).view(len(self), *self.shape)
        return grads if out is None else out.copy_(grads)

    def scale_rows(self, scale: Tensor) -> Outer:
        """Return the factor of sᵢ gᵢ for ``scale [B]``, in float32 at least."""
        return self.patches().scale_rows(scale)

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖², ``[B]`` float64."""
        if not self._squares_by_inner_products:
            return super().squared_norms()
        if not self._multiplies_pixels:
            return self.patches().squared_norms()
        # The terms may cancel: float32 would lose per cents.
        signals, images = (
            x.unflatten(2, (self.groups, -1)).movedim(1, 3).double() for x in (self.signals, self.inputs)
        )
        geometry = self._kernel[2:], self.stride, self.padding, self.dilation
        products = pixel_products(signals) * patch_products(images, *geometry)
        return products.flatten(1).sum(1).clamp_min(0)

    @property
    def _squares_by_inner_products(self) -> bool:
        return cost_model.inner_products_are_faster(self.size)

    def weighted_sum(self, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return Σ wᵢ gᵢ, ``[*shape]``, by the convolution that computes the batch gradient, on scaled signals."""
        signals = self.signals if weights is None else dtypes.scaled_rows(self.signals, weights, dtype)
        images, signals = self.inputs.flatten(0, 1).to(dtype), signals.flatten(0, 1).to(dtype)
        return kernel_grad(signals, images, self._kernel, self._geometry).view(self.shape)

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
        if not self._squares_by_inner_products:
            return super().squared_norms_of_outputs()
        if not self._multiplies_pixels:
            return self.patches().squared_norms_of_outputs()
        return torch.stack([factor.squared_norms() for factor in self.outputs()], 1)

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
