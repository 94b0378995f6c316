"""Norms of the gradients of several parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from persample.factors.base import Factor
from persample.factors.dense import Dense
from persample.factors.outer import Outer
from persample.utils.norms import squared_norms_of_each


def squared_norms_per_factor(factors: Sequence[Factor]) -> list[Tensor]:
    """Return ‖gᵢ‖² of each parameter: as ``Factor.squared_norms`` does, with one check for rows stored as they are.

    Args:
        factors: the gradients of one parameter each.

    Returns:
        ``[B]`` float64 each.
    """
    operands = [_operands(factor) for factor in factors]
    norms = iter(squared_norms_of_each([x for group in operands for x in group]))
    return [
        functools.reduce(torch.mul, [next(norms) for _ in group]) if group else factor.squared_norms()
        for factor, group in zip(factors, operands, strict=True)
    ]


def _operands(factor: Factor) -> list[Tensor]:
    """Return the tensors ``[B, ...]`` whose rows' norms multiply to those of the gradients; none if there are none."""
    if isinstance(factor, Dense):
        return [factor.values]
    if isinstance(factor, Outer) and factor.num_terms == 1 and factor.left.shape[1] == 1:
        return [factor.left, factor.right]
    return []
