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

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one gradient."""

    @property
    def num_terms(self) -> int:
        """T, the number of products that one gradient is the sum of; 1 where it is written out."""

    @property
    def stored(self) -> int:
        """Numbers stored, for all samples together."""

    def __len__(self) -> int:
        """Return B."""

    def rows(self: F, index: slice) -> F:
        """Return the factor of some of the samples."""

    def materialize(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients, ``[B, *shape]``, written into ``out`` where it is given."""

    def add_to(self, out: Tensor) -> None:
        """Add the gradients to ``out [B, *shape]``."""

    def zero_rows(self: F, rows: Tensor) -> F:
        """Return the factor whose gradients are exactly zero where the bool mask ``rows [B]`` holds."""

    def scale_rows(self, scale: Tensor) -> Factor:
        """Return the factor of sᵢ gᵢ for ``scale [B]`` float64, in float32 at least."""

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖², ``[B]`` float64."""

    def weighted_sum(self, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return Σ wᵢ gᵢ, ``[*shape]``, accumulated in ``dtype``."""

    def second_moment(self, weights: Tensor | None, dtype: torch.dtype, center: Tensor | None = None) -> Tensor:
        """Return Σ wᵢ (gᵢ − center)², elementwise ``[*shape]``, accumulated in ``dtype``."""

    def gram(self, other: Factor | None = None) -> Tensor:
        """Return ⟨gᵢ, hⱼ⟩, ``[B, B']``, in float32 at least; the gradients' own Gram matrix without ``other``."""

    def dot(self, directions: Tensor) -> Tensor:
        """Return ⟨gᵢ, dₖ⟩, ``[B, K]``, for ``directions [K, *shape]``, in float32 at least."""

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ``left[j]ᵀ gᵢ right[j]``, ``[B, K]``, gᵢ seen as ``[o, rest]``, for ``[K, o]`` and ``[K, rest]``."""

    @classmethod
    def concatenate(cls: type[F], factors: Sequence[F]) -> Factor | None:
        """Return the factor of the samples of all, or None where they do not fit together."""

    def add(self, other: Factor) -> Factor | None:
        """Return the factor of gᵢ + hᵢ, or None where one of this kind does not hold it."""
