"""Deferred gradients of convolution kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from persample.engines.deferred.terms import SignalTerm
from persample.factors.conv import Conv
from persample.factors.outer import Outer


@dataclass(frozen=True)
class ConvTerm(SignalTerm):
    """The gradient of the kernels of a grouped convolution; the groups of S samples stand side by side.

    Args:
        shape: the shape of the tensor, ``kernel_shape`` or a view of it.
        signals: back-propagated signals, ``[N, groups·o, *out]``.
        inputs: images, ``[N, groups·i, *in]``.
        kernel_shape: ``[groups·o, i, *k]``.
        settings: stride, padding and dilation.
        groups: the number of groups, of all samples together.
    """

    inputs: Tensor
    kernel_shape: tuple[int, ...]
    settings: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    groups: int

    @property
    def is_regular(self) -> bool:
        """Whether a convolution of the inputs has outputs of the sizes of the signals.

        False after a transposed convolution whose output was padded by a whole stride.
        """
        stride, padding, dilation = self.settings
        return list(self.signals.shape[2:]) == [
            (size + 2 * pad - apart * (taps - 1) - 1) // step + 1
            for size, pad, apart, taps, step in zip(
                self.inputs.shape[2:], padding, dilation, self.kernel_shape[2:], stride, strict=True
            )
        ]

    def compute(self, dtype: torch.dtype) -> Tensor:
        """Return the kernels."""
        return self._split(1).materialize().to(dtype).reshape(self.shape)

    def factor(self, dtype: torch.dtype) -> Conv | Outer | None:
        """Return the factor of one kernel per sample; of patches where the kernel was reshaped before its use."""
        samples = self.shape[0]
        if self.groups % samples or self.kernel_shape[0] % samples or dtype != self.inputs.dtype:
            return None
        split = self._split(samples)
        if self.shape[1:] == split.shape:
            return split
        lead = len(self.shape) - len(split.shape)  # the axes before C: (O), or (K, O) of K outputs
        if self.groups == samples and lead > 0 and self.shape[lead + 1 :] == split.shape[1:]:
            return replace(split, kernel_shape=self.shape[1:])
        patches = split.patches()
        return replace(patches, layout=replace(patches.layout, shape=self.shape[1:]))

    def reshape(self, shape: Sequence[int]) -> ConvTerm:
        """Return the kernels in another shape."""
        return replace(self, shape=tuple(shape))

    def _split(self, samples: int) -> Conv:
        signals, inputs = (x.unflatten(1, (samples, -1)).movedim(1, 0) for x in (self.signals, self.inputs))
        shape = (self.kernel_shape[0] // samples, *self.kernel_shape[1:])
        return Conv(signals, inputs, shape, *self.settings, self.groups // samples)
