"""Gradients written out in full: the factor that every parameter can fall back to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from persample.factors import contractions
from persample.factors.base import Factor


@dataclass(frozen=True)
class Dense(Factor):
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
            device: the device of the gradients.
        """
        return cls(torch.zeros(1, *shape, dtype=dtype, device=device).expand(size, *shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one gradient."""
        return tuple(self.values.shape[1:])

    @property
    def norm_operands(self) -> tuple[Tensor, ...]:
        """The gradients."""
        return (self.values,)

    def materialize(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients, ``[B, *shape]``."""
        return self.values if out is None else out.copy_(self.values)

    def add(self, other: Factor) -> Dense:
        """Return the factor of gᵢ + hᵢ, written out."""
        if isinstance(other, Dense):
            return Dense(self.values + other.values)
        values = self.values.clone(memory_format=torch.contiguous_format)
        other.add_to(values)
        return Dense(values)

    def weighted_sum(self, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return Σ wᵢ gᵢ, ``[*shape]``, accumulated in ``dtype``."""
        return contractions.weighted_sum(self.values, weights, dtype)

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        yield slice(None), self.values


def is_zeros(factor: Factor) -> bool:
    """Return whether a factor is that of a parameter that nothing depends on, as ``Dense.zeros`` returns it."""
    return isinstance(factor, Dense) and not any(factor.values.stride()[:1]) and not bool(factor.values.any())
