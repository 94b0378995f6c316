"""Gradients of convolution kernels, stored as signals and images; patches are cut out only where needed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from persample.factors import contractions, cost_model
from persample.factors.factor import Factor, row_format
from persample.factors.outer import Outer
from persample.factors.term_moments import TermMoments
from persample.utils import numerics
from persample.utils.trees import Leaf

_convolve = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


@dataclass(frozen=True)
class Conv(Factor):
    """Per-sample gradients of a kernel ``[O, C/groups, *k]``, for N images in each sample.

    A transposed convolution is the same with signals and inputs exchanged.

    Examples:
        >>> signals, inputs = torch.ones(2, 1, 1, 3), torch.ones(2, 1, 1, 4)
        >>> Conv(signals, inputs, (1, 1, 2), (1,), (0,), (1,), 1).materialize()[0]
        tensor([[[3., 3.]]])
    """

    signals: Tensor  # back-propagated signals, ``[B, N, O, *out]``; of K outputs ``[B, K, N, O, *out]``
    inputs: Tensor  # ``[B, N, C, *in]``; of K outputs, which share them, ``[B, 1, N, C, *in]``
    kernel_shape: tuple[int, ...]  # ``[O, C/groups, *k]``
    stride: tuple[int, ...]  # one number per spatial axis
    padding: tuple[int, ...]  # zeros on both sides, one number per spatial axis
    dilation: tuple[int, ...]  # one number per spatial axis
    groups: int  # the number of groups of channels

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel, and of those of K outputs."""
        return (*self.outputs, *self.kernel_shape)

    @property
    def num_terms(self) -> int:
        """T, the number of places that the kernel is applied to in one sample."""
        return _pixels(self.signals, len(self.stride))

    @property
    def _term_axes(self) -> tuple[int, int]:
        images = -2 - len(self.stride)
        return images, images

    @property
    def size(self) -> cost_model.Size:
        """The sizes by which the cost model estimates times, with inner products of pixels where these are fewer."""
        (signals, columns, *taps), count, terms = self._kernel, len(self), self.num_terms
        patches = count * terms * (signals + self.groups * columns * prod(taps))
        if not self._multiplies_pixels:
            return cost_model.Size(*super().size[:4], patches)
        pixels, images = _pixels(self.inputs, len(self.stride)), columns * self.groups
        products = terms**2 * signals + pixels**2 * images
        read = terms * signals + pixels * images + terms**2 * sum(taps) * self.groups
        return cost_model.Size(*super().size[:4], patches, (count * products, count * read))

    @property
    def _multiplies_pixels(self) -> bool:
        """Whether all pairs of pixels are fewer than all pairs of patches times the offsets in the kernel."""
        return _pixels(self.inputs, len(self.stride)) ** 2 <= prod(self._kernel[2:]) * self.num_terms**2

    @property
    def _kernel(self) -> tuple[int, ...]:
        """The shape of the kernel, with the channels of all outputs."""
        if not self.outputs:
            return self.kernel_shape
        rows, columns, *sizes = self.kernel_shape
        return (rows * self.signals.shape[1], columns * self.inputs.shape[1], *sizes)

    @property
    def _operands(self) -> tuple[Tensor, Tensor]:
        """Signals and images ``[B, N, …]``; in each group the channels of all outputs lie beside each other."""
        if not self.outputs:
            return self.signals, self.inputs
        signals, images = (x.unflatten(3, (self.groups, -1)).movedim(1, 3).flatten(2, 4) for x in self.tensors)
        return signals, images

    @property
    def as_one(self) -> Conv:
        """The K gradients of each sample as one, of K times as many channels."""
        if not self.outputs:
            return self
        signals, inputs = self._operands
        return replace(self, signals=signals, inputs=inputs, kernel_shape=self._kernel, outputs=())

    @property
    def order(self) -> tuple[object, ...]:
        """The number of groups, in each of which channels of all outputs lie side by side, as rows or columns."""
        return self.groups, self._kernel

    def _restored(self, grads: Tensor) -> Tensor:
        """Return gradients ``[n, *shape]`` from those of a kernel with the channels of all outputs."""
        if self.outputs:
            block = self.groups, self.kernel_shape[0] // self.groups, prod(self.kernel_shape[1:])
            grads = contractions.by_output(grads, block, (self.signals.shape[1], self.inputs.shape[1]))
        return grads.reshape(-1, *self.shape)

    def patches(self) -> Outer:
        """Return the same gradients as outer products of signals and patches of the images."""
        axes = range(len(self.stride))
        signals, images = (self.rows_of(x) for x in self.tensors)
        patches = pad(images, both_sides(self.padding))
        for axis in axes:
            size, dilation = self._kernel[2 + axis], self.dilation[axis]
            patches = patches.unfold(3 + axis, (size - 1) * dilation + 1, self.stride[axis])[..., ::dilation]
        # [B, N, C, *out, *k] and [B, N, O, *out] become [B, G, N·out, …]
        rows, kernel = self.kernel_shape[0] // self.groups, prod(self.kernel_shape[1:])
        split = patches.flatten(3, 2 + len(axes)).flatten(4).unflatten(2, (self.groups, -1))
        right = split.permute(0, 2, 1, 4, 3, 5).reshape(len(images), self.groups, self.num_terms, kernel)
        split = signals.flatten(3).unflatten(2, (self.groups, -1))
        left = split.permute(0, 2, 1, 4, 3).reshape(len(signals), self.groups, self.num_terms, rows)
        if self.outputs:
            left, right = left.unflatten(0, self.signals.shape[:2]), right.unflatten(0, self.inputs.shape[:2])
        return Outer(left, right, self.kernel_shape, self.dtype, outputs=self.outputs)

    def materialize(self, out: Tensor | None = None) -> Tensor:
        if self.signals.device.type != "cpu":  # cuDNN computes many groups one after the other
            return self.patches().materialize(out)
        grads = self._restored(kernel_grads(*self._operands, self._kernel, self._geometry))
        return grads if out is None else out.copy_(grads)

    def scale_rows(self, scale: Tensor) -> Outer:
        """Return the factor of sᵢ gᵢ for ``scale [B]``, in float32 at least."""
        return self.patches().scale_rows(scale)

    def squared_norms(self) -> Tensor:
        if not self._squares_by_inner_products:
            return super().squared_norms()
        if self.outputs and (self._multiplies_pixels or self.inputs.shape[1] > 1):  # not the patches of K at once
            return self.joined([one.squared_norms() for one in self.of_outputs])
        if not self._multiplies_pixels:
            return self.patches().squared_norms()
        # The terms may cancel: float32 would lose per cents.
        signals, images = (
            x.unflatten(2, (self.groups, -1)).movedim(1, 3).double() for x in (self.signals, self.inputs)
        )
        geometry = self._kernel[2:], self.stride, self.padding, self.dilation
        products = pixel_products(signals) * patch_products(images, *geometry)
        return products.flatten(1).sum(1).clamp_min(0)

    def term_norms(self) -> Tensor:
        """Return the norm of each place's signal times that of its patch, ``[B, T]``."""
        axes, lead = len(self.stride), len(self.sizes) + 1
        signals, images = (
            x.unflatten(lead, (self.groups, -1)).movedim(lead + 1, -1).double().square().sum(-1) for x in self.tensors
        )  # [B, N, G, *sizes]
        ones = images.new_ones(1, 1, *self.kernel_shape[2:])
        settings = (None, self.stride, self.padding, self.dilation)
        patches = _convolve[axes](images.flatten(0, lead).unsqueeze(1), ones, *settings)
        squares = signals * patches.view(*images.shape[: lead + 1], *signals.shape[lead + 1 :])
        return numerics.root(squares.sum(lead).flatten(lead - 1))

    def kronecker(self, moments: TermMoments) -> tuple[Tensor, Tensor]:
        """Return the second moments of signals and of patches, which are cut out of a few images at a time."""
        groups, patch = self.groups, prod(self._kernel[1:])
        step = cost_model.rows_per_block(len(self), self.num_terms * groups * patch, self.device)
        blocks = [slice(start, start + step) for start in range(0, max(len(self), 1), step)]
        pairs = [self.rows(rows).patches().kronecker(moments.rows(rows)) for rows in blocks]
        left, right = (functools.reduce(torch.add, side) for side in zip(*pairs, strict=True))
        return left, right

    @property
    def _squares_by_inner_products(self) -> bool:
        return cost_model.inner_products_are_faster(self.size)

    def weighted_sum(self, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return Σ wᵢ gᵢ, ``[*shape]``, by the convolution that computes the batch gradient, on scaled signals."""
        if weights is not None and weights.ndim > 1:
            return self.scale_outputs(weights, dtype).weighted_sum(None, dtype)
        signals, images = self._operands
        signals = signals if weights is None else numerics.scaled_rows(signals, weights, dtype)
        images, signals = images.flatten(0, 1).to(dtype), signals.flatten(0, 1).to(dtype)
        return self._restored(kernel_grad(signals, images, self._kernel, self._geometry)[None])[0]

    @property
    def _geometry(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
        return self.stride, self.padding, self.dilation, self.groups

    def gram(self, other: Factor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        return self.patches().gram(other.patches() if isinstance(other, Conv) else other, dtype)

    def dot(self, directions: Tensor) -> Tensor:
        """Return ⟨gᵢ, dⱼ⟩, ``[B, D]``: the signals times the convolution of the images with each direction."""
        dtype, lead = numerics.accumulate_dtype(self.dtype), len(self.sizes)
        images, signals = self.inputs.flatten(0, lead).to(dtype), self.signals.to(dtype)
        shape = *self.inputs.shape[: lead + 1], *signals.shape[lead + 1 :]
        settings = (None, self.stride, self.padding, self.dilation, self.groups)
        columns = []
        for kernel in directions.to(dtype):
            outputs = _convolve[len(self.stride)](images, kernel, *settings).view(shape)
            columns.append((signals * outputs).flatten(lead).sum(-1))
        return torch.stack(columns, -1)

    def projected_terms(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return the products of signals with signs, and those of patches: a convolution of the images with these."""
        dtype, lead, groups = numerics.accumulate_dtype(self.dtype), len(self.sizes) + 1, self.groups
        signs = left.to(dtype).view(len(left), groups, -1)
        signals = self.signals.to(dtype).flatten(lead + 1).unflatten(lead, (groups, -1))
        terms = torch.einsum("...gop,dgo->...gpd", signals, signs).flatten(lead - 1, -2)
        kernels = (
            right.to(dtype).view(len(right), *self.kernel_shape[1:]).repeat(groups, *[1] * len(self.kernel_shape[1:]))
        )
        images = self.inputs.to(dtype).flatten(0, lead - 1)
        settings = (None, self.stride, self.padding, self.dilation, groups)
        found = _convolve[len(self.stride)](images, kernels, *settings).flatten(2).unflatten(1, (groups, -1)).mT
        return terms, found.reshape(*self.inputs.shape[: lead - 1], -1, len(right))

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
        signals, inputs = (torch.cat(pair, len(self.sizes)) for pair in zip(self.tensors, other.tensors, strict=True))
        return replace(self, signals=signals, inputs=inputs)


def _pixels(images: Tensor, axes: int) -> int:
    """Return the number of pixels of the images of one sample and output, which have some spatial axes."""
    return images.shape[-axes - 2] * prod(images.shape[-axes:])


def kernel_grad(signals: Tensor, images: Tensor, shape: Sequence[int], geometry: tuple[Leaf, ...]) -> Tensor:
    """Return the gradient of one kernel from signals ``[N, O, *out]`` and images ``[N, C, *in]``."""
    kernel = images.new_empty(shape)  # only its shape is read; an expanded tensor would be copied
    *steps, groups = geometry
    if images.shape[2:].numel() == 1:  # torch rejects such an image if its strides are those of a slice
        images = images.flatten(1).view(images.shape)
    settings = (*steps, False, (0,) * len(steps[0]), groups)
    return torch.ops.aten.convolution_backward(signals, images, kernel, None, *settings, (False, True, False))[1]


def kernel_grads(signals: Tensor, images: Tensor, shape: Sequence[int], geometry: tuple[Leaf, ...]) -> Tensor:
    """Return the gradients ``[B, *shape]`` of each sample, by one convolution with B times as many groups."""
    size, (*steps, groups) = len(signals), geometry
    signals, images = (x.transpose(0, 1).flatten(1, 2) for x in (signals, images))
    grads = kernel_grad(signals, images, (size * shape[0], *shape[1:]), (*steps, size * groups))
    return grads.view(size, *shape)


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
    """Return ⟨pₛ, pₜ⟩ ``[B, G, N, *out, N, *out]`` for all places s and t that the kernel is applied to.

    The inner product of two patches is the sum of those of their pixels, so every pair of pixels is multiplied once,
    and not once per offset in the kernel. Those with pixels of the padding are zero: they are added afterwards. The
    offsets along one axis are summed after those along the axis before, so they add up and do not multiply. Images are
    without padding, ``[B, G, C, N, *in]``, C channels in each group; the rest is one number per spatial axis.
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
