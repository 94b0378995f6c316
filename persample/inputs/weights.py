"""The argument ``weights``, and the conditions of averages on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.inputs.batch import as_tensor
from persample.reductions import Reduction


def check_weights(weights: Any, size: int, device: torch.device) -> Tensor | None:
    """Return the weights as ``[B]`` float64.

    Args:
        weights: the argument.
        size: B.
        device: the device of the parameters.

    Raises:
        ArgumentError: if the weights are not B finite real numbers.
    """
    if weights is None:
        return None
    weights = as_tensor("weights", weights, torch.empty(0, dtype=torch.float64, device=device))
    try:
        dtype = None if isinstance(weights, Tensor) else torch.float64  # Python floats are doubles
        tensor = torch.as_tensor(weights, dtype=dtype, device=device).detach()
        received = f"shape {list(tensor.shape)}, {tensor.dtype}"
        valid = tensor.shape == (size,) and not tensor.is_complex()
    except (TypeError, ValueError, RuntimeError):
        valid, received = False, repr(weights)
    sizes = tensor.double().abs() if valid else None
    if sizes is not None and not bool(((sizes == 0) | ((sizes > 1e-30) & (sizes < 1e30))).all()):
        valid, received = False, "NaN or infinity or numbers beyond 1e±30 among them"
    if not valid:
        fix = "Pass one number per sample, shape [B]; a weight of 0 leaves a sample out."
        raise ArgumentError.about("weights", expected=f"{size} finite real numbers", received=received, fix=fix)
    return tensor.double()


def check_averages(wanted: Sequence[Reduction], weights: Tensor | None, size: int) -> None:
    """Reject averages without samples, with negative weights, or with weights that sum to too little.

    Args:
        wanted: the reductions of the call.
        weights: ``[B]``, or None for ones.
        size: B.

    Raises:
        ArgumentError: if the divisor of an average would not be positive, or if one of its weights is negative.
    """
    averages = [reduction for reduction in wanted if reduction.divides_by_weight]
    if not averages:
        return
    least = float("inf") if weights is None or not size else float(weights.min())
    total = size if weights is None else float(weights.sum())
    for reduction in averages:
        bound = reduction.needs_more_than
        if total > bound and least >= 0:
            continue
        name = f"{type(reduction).__name__}()"
        if weights is None:
            received, fix = f"B = {size}", "Leave such batches out, or ask for a sum."
        else:
            received = f"weights that sum to {total:g}, the smallest {least:g}"
            fix = f"An average takes weights >= 0 with a sum of more than {bound:g}; sums such as Sum() take any."
        expected = f"samples (or their weights, none negative) that add up to more than {bound:g}"
        raise ArgumentError.about(name, expected=expected, received=received, fix=fix)
