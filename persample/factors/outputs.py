"""The gradients of K outputs of each sample: B gradients of shape ``[K, *shape]``, or B·K of shape ``[*shape]``."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from persample.factors.base import Factor
from persample.factors.conv import Conv
from persample.factors.dense import Dense
from persample.factors.join import concatenate
from persample.factors.output_gram import gram_of_outputs
from persample.utils.dtypes import accumulate_dtype


@dataclass(frozen=True)
class Wrapped(Factor):
    """A factor that is computed from another one.

    Args:
        inner: the other factor.
    """

    inner: Factor

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the other factor."""
        return self.inner.tensors

    def to(self, device: torch.device) -> Wrapped:
        """Return the factor on a device."""
        return replace(self, inner=self.inner.to(device))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gradients."""
        return self.inner.dtype

    @property
    def num_terms(self) -> int:
        """T, of the other factor."""
        return self.inner.num_terms


@dataclass(frozen=True)
class PerOutput(Wrapped):
    """Per-sample gradients ``[K, *shape]`` of K outputs. What all outputs share (the inputs of layers) is stored once.

    Args:
        inner: the same gradients, as a factor that knows nothing of outputs.

    Examples:
        >>> factor = PerOutput(Dense(torch.tensor([[[3.0, 4.0], [0.0, 1.0]]])))
        >>> factor.by_output.squared_norms()
        tensor([25.,  1.], dtype=torch.float64)
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """``[K, *shape]``."""
        return self.inner.shape

    @functools.cached_property
    def by_output(self) -> Factor:
        """The same gradients as those of B·K samples: row i·K + k is that of output k of sample i."""
        if isinstance(self.inner, Dense):
            return Dense(self.inner.values.flatten(0, 1))
        return ByOutput(self.inner)

    def materialize(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients, ``[B, K, *shape]``."""
        return self.inner.materialize(out)

    def rows(self, index: slice | Tensor) -> PerOutput:
        """Return the factor of some of the samples."""
        return PerOutput(self.inner.rows(index))

    def zero_rows(self, rows: Tensor) -> PerOutput:
        """Return the factor whose gradients are exactly zero where the mask ``[B]`` holds, NaN or not."""
        return PerOutput(self.inner.zero_rows(rows))

    def scale_rows(self, scale: Tensor) -> PerOutput:
        """Return the factor of sᵢ gᵢₖ for ``scale [B]``, of sᵢₖ gᵢₖ for ``[B, K]``, in float32 at least."""
        if scale.ndim == 1:
            return PerOutput(self.inner.scale_rows(scale))
        largest = scale.amax(1)  # which both operands of a product get a part of: one alone might overflow
        rest = torch.where(scale == 0, 0, scale / largest[:, None])
        return PerOutput(self.inner.scale_rows(largest).scale_outputs(rest, accumulate_dtype(self.dtype)))

    def weighted_sum(self, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return Σᵢ wᵢ gᵢₖ, ``[K, *shape]``, for ``weights [B]``; Σᵢ wᵢₖ gᵢₖ for ``[B, K]``."""
        if weights is None or weights.ndim == 1:
            return self.inner.weighted_sum(weights, dtype)
        return self.inner.scale_outputs(weights, dtype).weighted_sum(None, dtype)

    def second_moment(self, weights: Tensor | None, dtype: torch.dtype, center: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ (gᵢₖ − centerₖ)², elementwise ``[K, *shape]``."""
        return self.inner.second_moment(weights, dtype, center)

    @classmethod
    def concatenate(cls, factors: Sequence[PerOutput]) -> PerOutput:
        """Return the factor of the samples of all."""
        return cls(concatenate([factor.inner for factor in factors]))


@dataclass(frozen=True)
class ByOutput(Wrapped):
    """The gradients of K outputs as those of B·K samples: row i·K + k is that of output k of sample i.

    Args:
        inner: the gradients, ``[K, *shape]`` for each of B samples.
    """

    @functools.cached_property
    def outputs_of_inner(self) -> Sequence[Factor]:
        """K factors of B samples, one for each output."""
        return self.inner.outputs()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one gradient."""
        return self.inner.shape[1:]

    def __len__(self) -> int:
        """Return B·K."""
        return len(self.inner) * self.inner.shape[0]

    def materialize(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients, ``[B·K, *shape]``."""
        values = self.inner.materialize().flatten(0, 1)
        return values if out is None else out.copy_(values)

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢₖ‖², ``[B·K]`` float64."""
        return self.inner.squared_norms_of_outputs().flatten()

    def weighted_sum(self, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return Σᵢₖ wᵢₖ gᵢₖ, ``[*shape]``."""
        scaled = self.inner if weights is None else self.inner.scale_outputs(weights.view(len(self.inner), -1), dtype)
        return scaled.weighted_sum(None, dtype).sum(0)

    def dot(self, directions: Tensor) -> Tensor:
        """Return ⟨gᵢₖ, d⟩, ``[B·K, D]`` for D directions."""
        return torch.stack([factor.dot(directions) for factor in self.outputs_of_inner], 1).flatten(0, 1)

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ``left[j]ᵀ gᵢₖ right[j]``, ``[B·K, D]``."""
        return torch.stack([factor.project(left, right) for factor in self.outputs_of_inner], 1).flatten(0, 1)

    def gram(self, other: Factor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return ⟨gᵢₖ, hⱼₗ⟩, ``[B·K, B'·K']``."""
        theirs = self if other is None else other
        if isinstance(theirs, Dense):
            return super().gram(theirs, dtype)
        if isinstance(theirs, ByOutput):
            mine, others = (x.patches() if isinstance(x, Conv) else x for x in (self.inner, theirs.inner))
            joint = gram_of_outputs(mine, mine if theirs is self else others, dtype)
            if joint is not None:
                return joint
        opposite = theirs.outputs_of_inner if isinstance(theirs, ByOutput) else [theirs]
        rows = [torch.stack([one.gram(two, dtype) for two in opposite], -1) for one in self.outputs_of_inner]
        return torch.stack(rows, 1).flatten(2).flatten(0, 1)

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        count = self.inner.shape[0]
        for index, block in self.inner._blocks():
            yield slice(index.start * count, index.stop * count), block.flatten(0, 1)


def by_row(factor: Factor) -> Factor:
    """Return a factor with one row for each gradient: of K outputs of B samples with B·K rows."""
    return factor.by_output if isinstance(factor, PerOutput) else factor


def unwrapped(factor: Factor) -> Factor:
    """Return the factor that stores the gradients of K outputs, or the same factor."""
    return factor.inner if isinstance(factor, PerOutput) else factor


def sizes(factor: Factor) -> tuple[int, ...]:
    """Return ``(B,)``, or ``(B, K)`` of K outputs."""
    return (len(factor), factor.shape[0]) if isinstance(factor, PerOutput) else (len(factor),)
