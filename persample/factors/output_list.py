"""The gradients of K outputs of each sample, as one factor for each output."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from persample.factors.base import Factor, with_tensors
from persample.factors.join import concatenate
from persample.utils.dtypes import scaled_rows


@dataclass(frozen=True)
class OutputList(Factor):
    """Per-sample gradients ``[K, *shape]``, as one factor for each of K outputs.

    Args:
        parts: the factors of the gradients of each output, of one kind.
    """

    parts: tuple[Factor, ...]

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of all parts; what they share is named once."""
        return tuple({id(x): x for part in self.parts for x in part.tensors}.values())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gradients."""
        return self.parts[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """``[K, *shape]``."""
        return (len(self.parts), *self.parts[0].shape)

    @property
    def num_terms(self) -> int:
        """T, of one output."""
        return self.parts[0].num_terms

    @property
    def is_product(self) -> bool:
        """Whether writing a gradient out takes matrix products."""
        return self.parts[0].is_product

    def to(self, device: torch.device) -> OutputList:
        """Return the factor on a device."""
        return OutputList(tuple(part.to(device) for part in self.parts))

    def outputs(self) -> Sequence[Factor]:
        """Return the factors of the gradients of each output."""
        return self.parts

    def scale_outputs(self, scale: Tensor, dtype: torch.dtype) -> OutputList:
        """Return the factor of sₖ gₖ for ``scale [B, K]``, in ``dtype``."""

        def scaled(part: Factor, column: Tensor) -> Factor:
            first, *others = part.tensors  # the first one is what gradients are linear in
            return with_tensors(part, [scaled_rows(first, column, dtype), *others])

        return OutputList(tuple(map(scaled, self.parts, scale.unbind(1))))

    def squared_norms_of_outputs(self) -> Tensor:
        """Return ‖gₖ‖², ``[B, K]`` float64."""
        return torch.stack([part.squared_norms() for part in self.parts], 1)

    def rows(self, index: slice | Tensor) -> OutputList:
        """Return the factor of some of the samples."""
        return OutputList(tuple(part.rows(index) for part in self.parts))

    def zero_rows(self, rows: Tensor) -> OutputList:
        """Return the factor whose gradients are exactly zero where the mask ``[B]`` holds, NaN or not."""
        return OutputList(tuple(part.zero_rows(rows) for part in self.parts))

    def scale_rows(self, scale: Tensor) -> OutputList:
        """Return the factor of sᵢ gᵢ for ``scale [B]``, in float32 at least."""
        return OutputList(tuple(part.scale_rows(scale) for part in self.parts))

    def materialize(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients, ``[B, K, *shape]``."""
        values = torch.stack([part.materialize() for part in self.parts], 1)
        return values if out is None else out.copy_(values)

    def weighted_sum(self, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return Σᵢ wᵢ gᵢₖ, ``[K, *shape]``."""
        return torch.stack([part.weighted_sum(weights, dtype) for part in self.parts])

    def second_moment(self, weights: Tensor | None, dtype: torch.dtype, center: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ (gᵢₖ − centerₖ)², elementwise ``[K, *shape]``."""
        centers: Any = [None] * len(self.parts) if center is None else center
        pairs = zip(self.parts, centers, strict=True)
        return torch.stack([part.second_moment(weights, dtype, middle) for part, middle in pairs])

    @classmethod
    def concatenate(cls, factors: Sequence[OutputList]) -> OutputList | None:
        """Return the factor of the samples of all, of as many outputs."""
        if len({len(factor.parts) for factor in factors}) > 1:
            return None
        return cls(tuple(map(concatenate, zip(*(factor.parts for factor in factors), strict=True))))

    def add(self, other: Factor) -> OutputList | None:
        """Return the factor of gᵢ + hᵢ, where its parts hold it."""
        if not isinstance(other, OutputList):
            return None
        parts = [one.add(two) for one, two in zip(self.parts, other.parts, strict=True)]
        known = tuple(part for part in parts if part is not None)
        return OutputList(known) if len(known) == len(parts) else None
