"""Gradients written out in full: the factor that every parameter can fall back to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from persample.factors.base import Factor
from persample.utils import dtypes, norms


@dataclass(frozen=True)
class Dense:
    """Per-sample gradients stored as one tensor.

    Args:
        values: the gradients, real, ``[B, *shape]``.

    Examples:
        >>> Dense(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).squared_norms()
        tensor([25.,  1.], dtype=torch.float64)
    """

    values: Tensor

    @classmethod
    def zeros(cls, size: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Dense:
        """Return the gradients of a parameter that nothing depends on, stored once for all samples.

        Args:
            size: B.
            shape: the shape of the parameter.
            dtype: the dtype of the gradients.
            device: where they are.
        """
        return cls(torch.zeros(1, *shape, dtype=dtype, device=device).expand(size, *shape))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gradients."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self.values.device

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one gradient."""
        return tuple(self.values.shape[1:])

    @property
    def num_terms(self) -> int:
        """1: nothing is left to add up."""
        return 1

    @property
    def stored(self) -> int:
        """Numbers stored."""
        return self.values.numel()

    def __len__(self) -> int:
        """Return B."""
        return self.values.shape[0]  # len of a tensor takes 2 µs

    def rows(self, index: slice) -> Dense:
        """Return the factor of some of the samples."""
        return Dense(self.values[index])

    def materialize(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients, ``[B, *shape]``."""
        return self.values if out is None else out.copy_(self.values)

    def add_to(self, out: Tensor) -> None:
        """Add the gradients to ``out [B, *shape]``."""
        out.add_(self.values)

    def zero_rows(self, rows: Tensor) -> Dense:
        """Return the factor with zeros in the rows where the mask ``[B]`` holds, NaN or not."""
        return Dense(self.values.masked_fill(rows.view(-1, *[1] * (self.values.ndim - 1)), 0))

    def scale_rows(self, scale: Tensor) -> Dense:
        """Return the factor of sᵢ gᵢ for ``scale [B]``, in float32 at least."""
        scaled = self.values.double() * scale.view(-1, *[1] * (self.values.ndim - 1))
        return Dense(scaled.to(dtypes.accumulate_dtype(self.dtype)))

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖², ``[B]`` float64."""
        return norms.squared_norms(self.values)

    def weighted_sum(self, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return Σ wᵢ gᵢ, ``[*shape]``."""
        if weights is None:
            return self.values.sum(0, dtype=dtype)
        return torch.mm(weights.to(dtype).unsqueeze(0), self._rows(dtype)).view(self.shape)

    def second_moment(self, weights: Tensor | None, dtype: torch.dtype, center: Tensor | None = None) -> Tensor:
        """Return Σ wᵢ (gᵢ − center)², elementwise ``[*shape]``."""
        deviations = self.values.to(dtype, copy=True)  # the one temporary of this size
        if center is not None:
            deviations.sub_(center)
        return Dense(deviations.mul_(deviations)).weighted_sum(weights, dtype)

    def gram(self, other: Factor | None = None) -> Tensor:
        """Return ⟨gᵢ, hⱼ⟩, ``[B, B']``."""
        rows = self._rows()
        return rows @ (rows if other is None else Dense(other.materialize())._rows()).T

    def dot(self, directions: Tensor) -> Tensor:
        """Return ⟨gᵢ, dₖ⟩, ``[B, K]``."""
        rows = self._rows()
        return rows @ directions.to(rows.dtype).reshape(len(directions), rows.shape[1]).T

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ``left[j]ᵀ gᵢ right[j]``, ``[B, K]``."""
        rows = self._rows()
        matrices = rows.view(len(rows), left.shape[1], right.shape[1])
        return torch.einsum("bok,ko->bk", matrices @ right.to(rows.dtype).T, left.to(rows.dtype))

    @classmethod
    def concatenate(cls, factors: Sequence[Dense]) -> Dense:
        """Return the gradients of the samples of all."""
        return cls(torch.cat([factor.values for factor in factors]))

    def add(self, other: Factor) -> Dense | None:
        """Return the factor of gᵢ + hᵢ: written out together."""
        values = self.values.clone(memory_format=torch.contiguous_format)
        other.add_to(values)
        return Dense(values)

    def _rows(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the gradients as the rows of one matrix, ``[B, P]``."""
        rows = self.values.to(dtype or dtypes.accumulate_dtype(self.dtype))
        return rows.reshape(rows.shape[0], rows.shape[1:].numel())  # -1 is ambiguous where B = 0
