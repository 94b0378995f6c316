"""What a tensor that was not computed yet is the sum of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from persample.factors.base import Factor
from persample.factors.dense import Dense


class DeferredTerm:
    """A tensor of a known shape, given by what it is computed from.

    The operations below return the term of the changed tensor, or None where the tensor itself must be computed.
    """

    shape: tuple[int, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What the value is computed from: writing into any of it would change the value."""
        raise NotImplementedError

    def compute(self, dtype: torch.dtype) -> Tensor:
        """Return the tensor itself."""
        raise NotImplementedError

    def factor(self, dtype: torch.dtype) -> Factor | None:
        """Return the factor of the samples that the first axis counts."""
        raise NotImplementedError

    def scale(self, number: Any) -> DeferredTerm | None:
        """Return the product with a number, or with a tensor that broadcasts to the shape."""
        raise NotImplementedError

    def reshape(self, shape: Sequence[int]) -> DeferredTerm | None:
        """Return the tensor in another shape."""
        raise NotImplementedError

    def permute(self, dims: Sequence[int]) -> DeferredTerm | None:  # noqa: ARG002 (most terms cannot)
        """Return the tensor with its axes in another order."""
        return None

    def pick(self, dim: int, index: slice) -> DeferredTerm | None:  # noqa: ARG002
        """Return a range along one axis."""
        return None

    def place(self, dim: int, size: int, index: slice) -> DeferredTerm | None:  # noqa: ARG002
        """Return the tensor as a range of a larger one that is zero elsewhere: the adjoint of ``pick``."""
        return None

    def contract(self, dim: int, matrix: Tensor) -> DeferredTerm | None:  # noqa: ARG002
        """Return the tensor with the axis ``dim`` (-1 or -2) contracted with the first axis of a matrix."""
        return None


@dataclass(frozen=True)
class SignalTerm(DeferredTerm):
    """A tensor that is linear in its signals.

    Args:
        signals: back-propagated signals.
    """

    signals: Tensor

    def scale(self, number: Any) -> SignalTerm | None:
        """Return the product with a number."""
        alone = not isinstance(number, Tensor) or number.ndim == 0
        return replace(self, signals=self.signals * number) if alone else None


@dataclass(frozen=True)
class Given(DeferredTerm):
    """A tensor that is there already.

    Args:
        value: the tensor.
    """

    value: Tensor

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The shape of the tensor."""
        return tuple(self.value.shape)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensor."""
        return (self.value,)

    def compute(self, dtype: torch.dtype) -> Tensor:
        """Return the tensor."""
        return self.value.to(dtype)

    def factor(self, dtype: torch.dtype) -> Dense:
        """Return the tensor as a factor."""
        return Dense(self.value.to(dtype))

    def scale(self, number: Any) -> Given:
        """Return the product with a number."""
        return Given(self.value * number)

    def reshape(self, shape: Sequence[int]) -> Given:
        """Return the tensor in another shape."""
        return Given(self.value.reshape(tuple(shape)))

    def permute(self, dims: Sequence[int]) -> Given:
        """Return the tensor with its axes in another order."""
        return Given(self.value.permute(*dims))
