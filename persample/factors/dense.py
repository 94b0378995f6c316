"""Gradients written out in full: the factor that every parameter can fall back to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from persample.factors import contractions
from persample.factors.base import Factor


@dataclass(frozen=True)
class Dense(Factor):
    """Per-sample gradients stored as one tensor.

    Args:
        values: the gradients, real, ``[B, *shape]``, of K outputs ``[B, K, *shape]``.

    Examples:
        >>> Dense(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).squared_norms()
        tensor([25.,  1.], dtype=torch.float64)
    """

    values: Tensor

    @classmethod
    def zeros(cls, sizes: Sequence[int], like: Tensor) -> Dense:
        """Return the gradients of a parameter that nothing depends on, stored once for all of them.

        Args:
            sizes: ``(B,)``, or ``(B, K)`` of K outputs.
            like: a real parameter.
        """
        return cls(torch.zeros_like(like).expand(*sizes, *like.shape), outputs=tuple(sizes[1:]))

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
            return replace(self, values=self.values + other.values)
        values = self.values.clone(memory_format=torch.contiguous_format)
        other.add_to(values)
        return replace(self, values=values)

    def weighted_sum(self, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return Σ wᵢ gᵢ, ``[*shape]``, accumulated in ``dtype``."""
        return contractions.weighted_sum(self.values, weights, dtype)

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        yield slice(None), self.values


def concatenate(factors: Sequence[Factor]) -> Factor:
    """Return one factor for the samples of all. Unlike kinds are written out.

    Args:
        factors: at least one.

    Examples:
        >>> concatenate([Dense(torch.ones(2, 3)), Dense(torch.ones(1, 3))]).materialize().shape
        torch.Size([3, 3])
    """
    kinds = {type(factor) for factor in factors}
    joined = kinds.pop().concatenate(factors) if len(kinds) == 1 else None
    if joined is not None:
        return joined
    return Dense(torch.cat([factor.materialize() for factor in factors]), outputs=factors[0].outputs)


def is_zeros(factor: Factor) -> bool:
    """Return whether a factor is that of a parameter that nothing depends on, as ``Dense.zeros`` returns it."""
    return isinstance(factor, Dense) and not any(factor.values.stride()[:1]) and not bool(factor.values.any())
