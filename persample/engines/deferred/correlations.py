"""Gradients of convolution kernels that were not computed yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from persample.engines.deferred.terms import SignalTerm
from persample.factors.conv import Conv
from persample.factors.outer import Outer


@dataclass(frozen=True)
class Correlations(SignalTerm):
    """Kernels of grouped convolutions: signals correlated with inputs, S samples standing among the groups.

    Args:
        signals: ``[N, groups·o, *out]``.
        inputs: ``[N, groups·i, *in]``.
        kernel: the shape ``[groups·o, i, *k]``.
        settings: stride, padding and dilation.
        groups: all groups, those of all samples.
        shape: the shape of the tensor, ``kernel`` or a view of it.
    """

    inputs: Tensor
    kernel: tuple[int, ...]
    settings: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    groups: int
    shape: tuple[int, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The signals and the inputs."""
        return (self.signals, self.inputs)

    @property
    def is_regular(self) -> bool:
        """Whether a convolution of the inputs would have as many places as there are signals.

        It would not after a transposed one whose output was padded by a whole stride.
        """
        stride, padding, dilation = self.settings
        return list(self.signals.shape[2:]) == [
            (size + 2 * pad - apart * (taps - 1) - 1) // step + 1
            for size, pad, apart, taps, step in zip(
                self.inputs.shape[2:], padding, dilation, self.kernel[2:], stride, strict=True
            )
        ]

    def _split(self, samples: int) -> Conv:
        signals, inputs = (x.unflatten(1, (samples, -1)).movedim(1, 0) for x in self.tensors)
        shape = (self.kernel[0] // samples, *self.kernel[1:])
        return Conv(signals, inputs, shape, *self.settings, self.groups // samples)

    def compute(self, dtype: torch.dtype) -> Tensor:
        """Return the kernels."""
        return self._split(1).materialize().to(dtype).reshape(self.shape)

    def factor(self, dtype: torch.dtype) -> Conv | Outer | None:
        """Return the kernel of each sample; one that was reshaped before its use as the product of its patches."""
        samples = self.shape[0]
        if self.groups % samples or self.kernel[0] % samples or dtype != self.inputs.dtype:
            return None
        split = self._split(samples)
        if self.shape[1:] == split.shape:
            return split
        patches = split.patches()
        return replace(patches, layout=replace(patches.layout, shape=self.shape[1:]))

    def reshape(self, shape: Sequence[int]) -> Correlations:
        """Return the kernels in another shape."""
        return replace(self, shape=tuple(shape))
