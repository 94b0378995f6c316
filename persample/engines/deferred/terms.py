"""Deferred terms: descriptions of tensors that are not computed yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from persample.factors.base import Factor, tensor_fields
from persample.factors.dense import Dense


@dataclass(frozen=True)
class DeferredTerm:
    """A tensor that is not computed yet. The fields of a subclass hold the tensors that it is computed from.

    A subclass defines ``compute`` and ``factor``. The other operations return the term of the changed tensor, or None
    where the tensor must be computed: the default.

    Args:
        shape: the shape of the tensor.
    """

    shape: tuple[int, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the value is computed from."""
        return tuple(tensor_fields(self).values())

    def compute(self, dtype: torch.dtype) -> Tensor:
        """Return the tensor."""
        raise NotImplementedError

    def factor(self, dtype: torch.dtype) -> Factor | None:
        """Return the factor whose samples are the rows of the tensor, or None where it has no factored form."""
        raise NotImplementedError

    def scale(self, number: Any) -> DeferredTerm | None:  # noqa: ARG002
        """Return the product with a number, or with a tensor that broadcasts to the shape."""
        return None

    def reshape(self, shape: Sequence[int]) -> DeferredTerm | None:  # noqa: ARG002
        """Return the tensor in another shape."""
        return None

    def permute(self, dims: Sequence[int]) -> DeferredTerm | None:  # noqa: ARG002
        """Return the tensor with its axes in another order."""
        return None

    def pick(self, dim: int, index: slice) -> DeferredTerm | None:  # noqa: ARG002
        """Return a range along one axis."""
        return None

    def place(self, dim: int, size: int, index: slice) -> DeferredTerm | None:  # noqa: ARG002
        """Return a tensor of ``size`` along one axis, zero outside of a range: the adjoint of ``pick``."""
        return None

    def contract(self, dim: int, matrix: Tensor) -> DeferredTerm | None:  # noqa: ARG002
        """Return the tensor with the axis ``dim`` (-1 or -2) contracted with the first axis of a matrix."""
        return None


@dataclass(frozen=True)
class SignalTerm(DeferredTerm):
    """A tensor that is linear in its signals.

    Args:
        shape: the shape of the tensor.
        signals: back-propagated signals.
    """

    signals: Tensor

    def scale(self, number: Any) -> SignalTerm | None:
        """Return the product with a number."""
        is_number = not isinstance(number, Tensor) or number.ndim == 0
        return replace(self, signals=self.signals * number) if is_number else None


@dataclass(frozen=True)
class ComputedTerm(DeferredTerm):
    """A tensor that is computed already.

    Args:
        shape: the shape of the tensor.
        value: the tensor.
    """

    value: Tensor

    @classmethod
    def of(cls, value: Tensor) -> ComputedTerm:
        """Return the term of a tensor."""
        return cls(tuple(value.shape), value)

    def compute(self, dtype: torch.dtype) -> Tensor:
        """Return the tensor."""
        return self.value.to(dtype)

    def factor(self, dtype: torch.dtype) -> Dense:
        """Return the tensor as a factor."""
        return Dense(self.value.to(dtype))

    def scale(self, number: Any) -> ComputedTerm:
        """Return the product with a number, or with a tensor that broadcasts to the shape."""
        return self.of(self.value * number)

    def reshape(self, shape: Sequence[int]) -> ComputedTerm:
        """Return the tensor in another shape."""
        return self.of(self.value.reshape(tuple(shape)))

    def permute(self, dims: Sequence[int]) -> ComputedTerm:
        """Return the tensor with its axes in another order."""
        return self.of(self.value.permute(*dims))
