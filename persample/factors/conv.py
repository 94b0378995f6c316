"""Gradients of convolution kernels: signals times patches of the input, which are cut out only where they must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from persample.factors import blocks, cost_model
from persample.factors.base import Factor
from persample.factors.layout import Layout
from persample.factors.outer import Outer
from persample.utils import dtypes
from persample.utils.tracing import current_trace

_convolve = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


@dataclass(frozen=True)
class Conv:
    """Per-sample gradients of a kernel ``[O, C/groups, *k]``, for N images in each sample.

    A transposed convolution is the same with signals and inputs exchanged.

    Args:
        signals: back-propagated signals, ``[B, N, O, *out]``.
        inputs: ``[B, N, C, *in]``.
        shape: the kernel's shape.
        stride: one number per spatial axis.
        padding: zeros on both sides, the same.
        dilation: the same.
        groups: into how many groups the channels fall.

    Examples:
        >>> signals, inputs = torch.ones(2, 1, 1, 3), torch.ones(2, 1, 1, 4)
        >>> Conv(signals, inputs, (1, 1, 2), (1,), (0,), (1,), 1).materialize()[0]
        tensor([[[3., 3.]]])
    """

    signals: Tensor
    inputs: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gradients."""
        return self.signals.dtype

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self.signals.device

    @property
    def num_terms(self) -> int:
        """T, the number of places a kernel is applied to in one sample."""
        return self.signals.shape[1] * prod(self.signals.shape[3:])

    @property
    def stored(self) -> int:
        """Numbers stored."""
        return self.signals.numel() + self.inputs.numel()

    def __len__(self) -> int:
        """Return B."""
        return len(self.signals)

    def rows(self, index: slice) -> Conv:
        """Return the factor of some of the samples."""
        return replace(self, signals=self.signals[index], inputs=self.inputs[index])

    def patches(self) -> Outer:
        """Return the same as an outer product: every patch of the input is cut out."""
        axes = range(len(self.stride))
        sides = [side for axis in reversed(axes) for side in [self.padding[axis]] * 2]
        patches = pad(self.inputs, sides)
        for axis in axes:
            size, dilation = self.shape[2 + axis], self.dilation[axis]
            patches = patches.unfold(3 + axis, (size - 1) * dilation + 1, self.stride[axis])[..., ::dilation]
        # [B, N, C, *out, *k] and [B, N, O, *out] become [B, G, N·out, …]
        kernel = prod(self.shape[1:])
        split = patches.flatten(3, 2 + len(axes)).flatten(4).unflatten(2, (self.groups, -1))
        right = split.permute(0, 2, 1, 4, 3, 5).reshape(len(self), self.groups, self.num_terms, kernel)
        signals = self.signals.flatten(3).unflatten(2, (self.groups, -1))
        left = signals.permute(0, 2, 1, 4, 3).reshape(len(self), self.groups, self.num_terms, -1)
        groups = (self.groups,) if self.groups > 1 else ()
        order = tuple(range(len(groups) + 2))
        layout = Layout(groups, (self.shape[0] // self.groups,), (kernel,), order, self.shape)
        return Outer(left, right, layout, self.dtype)

    def materialize(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients, ``[B, *shape]``: one convolution in which the samples stand among the groups."""
        trace = current_trace()
        if trace is not None and trace.any_size:  # a program for any number of samples cannot have as many groups
            return self.patches().materialize(out)
        signals, images = (x.transpose(0, 1).flatten(1, 2) for x in (self.signals, self.inputs))
        shape = (len(self) * self.shape[0], *self.shape[1:])
        grads = self._correlated(signals, images, shape, len(self) * self.groups).view(len(self), *self.shape)
        return grads if out is None else out.copy_(grads)

    def add_to(self, out: Tensor) -> None:
        """Add the gradients to ``out [B, *shape]``."""
        out.add_(self.materialize())

    def zero_rows(self, rows: Tensor) -> Conv:
        """Return the factor with zeros in the rows where the mask ``[B]`` holds: either operand may hold NaN."""
        mask = rows.view(-1, *[1] * (self.signals.ndim - 1))
        return replace(self, signals=self.signals.masked_fill(mask, 0), inputs=self.inputs.masked_fill(mask, 0))

    def scale_rows(self, scale: Tensor) -> Outer:
        """Return the factor of sᵢ gᵢ for ``scale [B]``, in float32 at least."""
        return self.patches().scale_rows(scale)

    @property
    def by_gram(self) -> bool:
        """Whether norms are taken from inner products, not by writing the gradients out."""
        return cost_model.gram_is_cheaper(self.num_terms, self.shape[0] // self.groups, prod(self.shape[1:]))

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖², ``[B]`` float64."""
        return self.patches().squared_norms() if self.by_gram else blocks.squared_norms(self)

    def weighted_sum(self, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return Σ wᵢ gᵢ, ``[*shape]``: the convolution that computes the batch gradient, on scaled signals."""
        signals = self.signals if weights is None else dtypes.scaled_rows(self.signals, weights, dtype)
        images, signals = self.inputs.flatten(0, 1).to(dtype), signals.flatten(0, 1).to(dtype)
        return self._correlated(signals, images, self.shape, self.groups)

    def _correlated(self, signals: Tensor, images: Tensor, shape: tuple[int, ...], groups: int) -> Tensor:
        """Return the gradient of one kernel from signals ``[N, O, *out]`` and images ``[N, C, *in]``."""
        kernel = images.new_empty(shape)  # only its shape matters; one that is expanded would be copied
        settings = (self.stride, self.padding, self.dilation, False, (0,) * len(self.stride), groups)
        return torch.ops.aten.convolution_backward(signals, images, kernel, None, *settings, (False, True, False))[1]

    def second_moment(self, weights: Tensor | None, dtype: torch.dtype, center: Tensor | None = None) -> Tensor:
        """Return Σ wᵢ (gᵢ − center)², elementwise ``[*shape]``."""
        return blocks.second_moment(self, weights, dtype, center)

    def gram(self, other: Factor | None = None) -> Tensor:
        """Return ⟨gᵢ, hⱼ⟩, ``[B, B']``."""
        return self.patches().gram(other.patches() if isinstance(other, Conv) else other)

    def dot(self, directions: Tensor) -> Tensor:
        """Return ⟨gᵢ, dₖ⟩, ``[B, K]``: the signals times the convolution with each direction."""
        dtype = dtypes.accumulate_dtype(self.dtype)
        images, signals = self.inputs.flatten(0, 1).to(dtype), self.signals.to(dtype)
        settings = (None, self.stride, self.padding, self.dilation, self.groups)
        columns = []
        for kernel in directions.to(dtype):
            seen = _convolve[len(self.stride)](images, kernel, *settings).view(signals.shape)
            columns.append((signals * seen).flatten(1).sum(1))
        return torch.stack(columns, 1)

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ``left[j]ᵀ gᵢ right[j]``, ``[B, K]``."""
        return self.patches().project(left, right)

    @classmethod
    def concatenate(cls, factors: Sequence[Conv]) -> Factor | None:
        """Return the gradients of the samples of all."""
        if len({_image_shapes(factor) for factor in factors}) == 1:
            return _joined(factors, 0)
        return Outer.concatenate([factor.patches() for factor in factors])

    def add(self, other: Factor) -> Factor | None:
        """Return the factor of gᵢ + hᵢ: more images, or more patches."""
        if not isinstance(other, Conv):
            return None
        same = _image_shapes(self) == _image_shapes(other)
        return _joined([self, other], 1) if same else self.patches().add(other.patches())


def _joined(factors: Sequence[Conv], axis: int) -> Conv:
    signals, inputs = (torch.cat(x, axis) for x in zip(*((f.signals, f.inputs) for f in factors), strict=True))
    return replace(factors[0], signals=signals, inputs=inputs)


def _image_shapes(factor: Conv) -> tuple[object, ...]:
    geometry = (factor.stride, factor.padding, factor.dilation, factor.groups, factor.signals.shape[1])
    return (*geometry, factor.signals.shape[3:], factor.inputs.shape[3:])
