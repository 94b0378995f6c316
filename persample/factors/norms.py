"""Norms of the gradients of several parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from persample.factors.base import Factor
from persample.utils.norms import squared_norms_of_each


def squared_norms_per_factor(factors: Sequence[Factor]) -> list[Tensor]:
    """Return ‖gᵢ‖² of each parameter: as ``Factor.squared_norms``, with one check of the magnitudes of all operands.

    Args:
        factors: the gradients of one parameter each.

    Returns:
        ``[B]`` float64 each.
    """
    operands = [factor.norm_operands for factor in factors]
    norms = iter(squared_norms_of_each([x for group in operands for x in group]))
    return [
        functools.reduce(torch.mul, [next(norms) for _ in group]) if group else factor.squared_norms()
        for factor, group in zip(factors, operands, strict=True)
    ]
