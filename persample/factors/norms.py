"""Norms of the gradients of several parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from persample.factors.base import Factor
from persample.factors.terms import squared_norms_of_sums
from persample.utils.norms import squared_norms_of_each


def squared_norms_per_factor(factors: Sequence[Factor]) -> list[Tensor]:
    """Return ‖gᵢ‖² of each parameter: as ``Factor.squared_norms``, with one check of the magnitudes of all operands.

    What several factors share, as layers with one input do, is read once.

    Args:
        factors: the gradients of one parameter each.

    Returns:
        ``[B]`` float64 each.
    """
    operands = [factor.norm_operands for factor in factors]
    norms = iter(squared_norms_of_each([x for group in operands for x in group]))
    terms = [factor.term_operands for factor in factors]
    sums = iter(squared_norms_of_sums([pair for pair in terms if pair is not None]))

    def of_factor(factor: Factor, operands: tuple[Tensor, ...], terms: tuple[Tensor, Tensor] | None) -> Tensor:
        if operands:
            return functools.reduce(torch.mul, [next(norms) for _ in operands])
        return factor.squared_norms() if terms is None else next(sums)

    return list(map(of_factor, factors, operands, terms))
