"""The argument ``weights``, and the conditions of averages on it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.inputs.batch import as_tensors
from persample.reductions import Reduction
from persample.utils.tracing import is_hidden

_divides_by_weight = operator.attrgetter("divides_by_weight")


def check_weights(weights: Any, size: int, *, keep_graph: bool = False) -> Tensor | None:
    """Return the weights as ``[B]`` float64 on the CPU, where they are checked; those of a GPU are read once.

    Args:
        weights: the argument.
        size: B.
        keep_graph: whether derivatives pass through the weights.

    Raises:
        ArgumentError: if the weights are not B finite real numbers.
    """
    if weights is None:
        return None
    weights = as_tensors(["weights"], [weights], torch.empty(0, dtype=torch.float64, device="cpu"))[0]
    try:
        dtype = None if isinstance(weights, Tensor) else torch.float64  # Python floats are doubles
        tensor = torch.as_tensor(weights, dtype=dtype, device="cpu")
        tensor = tensor if keep_graph else tensor.detach()
        received = f"shape {list(tensor.shape)}, {tensor.dtype}"
        valid = tensor.shape == (size,) and not tensor.is_complex()
    except (TypeError, ValueError, RuntimeError):
        valid, received = False, repr(weights)
    sizes = tensor.double().abs() if valid and not is_hidden(tensor) else None
    if sizes is not None and not bool(((sizes == 0) | ((sizes > 1e-30) & (sizes < 1e30))).all()):
        valid, received = False, "NaN or infinity or numbers beyond 1e±30 among them"
    if not valid:
        fix = "Pass one number per sample, shape [B]; a weight of 0 leaves a sample out."
        raise ArgumentError.about("weights", expected=f"{size} finite real numbers", received=received, fix=fix)
    return tensor.double()


class TotalWeight(NamedTuple):
    """The weights of the samples of a call, or of several batches.

    Attributes:
        total: Σ wᵢ.
        least: the smallest weight, ∞ without samples.
        given: whether any weights were given.
    """

    total: float = 0.0
    least: float = float("inf")
    given: bool = False

    @classmethod
    def of(cls, weights: Tensor | None, size: int) -> TotalWeight:
        """Return those of ``weights [B]``, or of B ones."""
        if weights is None:
            return cls(float(size))
        weights = weights.detach()
        return cls(float(weights.sum()), float(weights.min()) if size else float("inf"), given=True)

    def merge(self, other: TotalWeight) -> TotalWeight:
        """Return those of the samples of both."""
        least = min(self.least, other.least)
        return TotalWeight(self.total + other.total, least, self.given or other.given)

    def check(self, wanted: Sequence[Reduction]) -> None:
        """Reject averages without samples, with negative weights, or with weights that sum to too little.

        Args:
            wanted: the reductions of the call.

        Raises:
            ArgumentError: if the divisor of an average would not be positive, or if one of its weights is negative.
        """
        for reduction in filter(_divides_by_weight, wanted):
            bound = reduction.needs_more_than
            if self.total > bound and self.least >= 0:
                continue
            name = f"{type(reduction).__name__}()"
            received, fix = f"B = {self.total:.0f}", "Take more samples, leave such a batch out, or ask for a sum."
            if self.given:
                received = f"weights that sum to {self.total:g}, the smallest {self.least:g}"
                fix = f"An average takes weights >= 0 with a sum of more than {bound:g}; sums such as Sum() take any."
            expected = f"samples (or their weights, none negative) that add up to more than {bound:g}"
            raise ArgumentError.about(name, expected=expected, received=received, fix=fix)


def check_averages(wanted: Sequence[Reduction], weights: Tensor | None, size: int) -> None:
    """Reject averages that have no divisor.

    Args:
        wanted: the reductions of the call.
        weights: ``[B]``, or None for ones.
        size: B.

    Raises:
        ArgumentError: as ``TotalWeight.check`` does.
    """
    if any(map(_divides_by_weight, wanted)) and not is_hidden(weights):
        TotalWeight.of(weights, size).check(wanted)
