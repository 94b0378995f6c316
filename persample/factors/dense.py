"""Gradients written out in full: the factor that every parameter can fall back to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from persample import numeric


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

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gradients."""
        return self.values.dtype

    def materialize(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients, ``[B, *shape]``."""
        return self.values if out is None else out.copy_(self.values)

    def zero_rows(self, rows: Tensor) -> Dense:
        """Return the factor with zeros in the rows where the mask ``[B]`` holds, NaN or not."""
        return Dense(self.values.masked_fill(rows.view(-1, *[1] * (self.values.ndim - 1)), 0))

    def scale_rows(self, scale: Tensor) -> Dense:
        """Return the factor of sᵢ gᵢ for ``scale [B]``, in float32 at least."""
        scaled = self.values.double() * scale.view(-1, *[1] * (self.values.ndim - 1))
        return Dense(scaled.to(numeric.accumulate_dtype(self.dtype)))

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖², ``[B]`` float64."""
        return numeric.squared_norms(self.values)

    def weighted_sum(self, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return Σ wᵢ gᵢ, ``[*shape]``."""
        if weights is None:
            return self.values.sum(0, dtype=dtype)
        # Scales of huge or tiny gradients may not exist in float32: those rows are added in float64.
        strange = (weights != 0) & ~((weights.abs() > 1e-30) & (weights.abs() < 1e30))
        if dtype != torch.float64 and not numeric.is_wrapped(strange) and bool(strange.any()):
            ordinary = Dense(self.values[~strange]).weighted_sum(weights[~strange], dtype)
            return ordinary + Dense(self.values[strange]).weighted_sum(weights[strange], torch.float64).to(dtype)
        return torch.tensordot(weights.to(dtype), self.values.to(dtype), 1)

    def second_moment(self, weights: Tensor | None, dtype: torch.dtype, center: Tensor | None = None) -> Tensor:
        """Return Σ wᵢ (gᵢ − center)², elementwise ``[*shape]``."""
        deviations = self.values.to(dtype, copy=True)  # the one temporary of this size
        if center is not None:
            deviations.sub_(center)
        return Dense(deviations.square_()).weighted_sum(weights, dtype)

    def gram(self) -> Tensor:
        """Return ⟨gᵢ, gⱼ⟩, ``[B, B]``."""
        rows = self._rows()
        return rows @ rows.T

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
        """Return the factor of all samples of several."""
        return cls(torch.cat([factor.values for factor in factors]))

    def _rows(self) -> Tensor:
        """Return the gradients as the rows of one matrix, ``[B, P]``."""
        rows = self.values.to(numeric.accumulate_dtype(self.dtype))
        return rows.reshape(len(rows), rows.shape[1:].numel())  # -1 is ambiguous where B = 0
