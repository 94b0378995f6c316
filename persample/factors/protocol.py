"""The one interface between the reductions and the ways to store a parameter's per-sample gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound="Factor")


class Factor(Protocol):
    """The gradients g₁ … g_B of one parameter of shape ``shape``; complex parameters count as pairs of reals.

    ``weights`` below are ``[B]`` float64, or None for ones.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The real dtype of the gradients."""

    def materialize(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients, ``[B, *shape]``, written into ``out`` where it is given."""

    def zero_rows(self: F, rows: Tensor) -> F:
        """Return the factor whose gradients are exactly zero where the bool mask ``rows [B]`` holds."""

    def scale_rows(self: F, scale: Tensor) -> F:
        """Return the factor of sᵢ gᵢ for ``scale [B]`` float64, in float32 at least."""

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖², ``[B]`` float64."""

    def weighted_sum(self, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return Σ wᵢ gᵢ, ``[*shape]``, accumulated in ``dtype``."""

    def second_moment(self, weights: Tensor | None, dtype: torch.dtype, center: Tensor | None = None) -> Tensor:
        """Return Σ wᵢ (gᵢ − center)², elementwise ``[*shape]``, accumulated in ``dtype``."""

    def gram(self) -> Tensor:
        """Return ⟨gᵢ, gⱼ⟩, ``[B, B]``, in float32 at least."""

    def dot(self, directions: Tensor) -> Tensor:
        """Return ⟨gᵢ, dₖ⟩, ``[B, K]``, for ``directions [K, *shape]``, in float32 at least."""

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ``left[j]ᵀ gᵢ right[j]``, ``[B, K]``, gᵢ seen as ``[o, rest]``, for ``[K, o]`` and ``[K, rest]``."""

    @classmethod
    def concatenate(cls: type[F], factors: Sequence[F]) -> F:
        """Return the factor of all samples of several factors of this kind."""


def concatenate(factors: Sequence[Factor]) -> Factor:
    """Return one factor for the samples of all, which are of one kind.

    Examples:
        >>> from persample.factors import Dense
        >>> concatenate([Dense(torch.ones(2, 3)), Dense(torch.ones(1, 3))]).materialize().shape
        torch.Size([3, 3])
    """
    return type(factors[0]).concatenate(factors)
