"""Norms of the gradients of several parameters."""

from __future__ import annotations

from collections.abc import Sequence

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
    terms = [() if own else factor.term_operands for factor, own in zip(factors, operands, strict=True)]
    pairs = [pair for of_factor in terms for pair in of_factor]
    sums = iter(squared_norms_of_sums(pairs) if pairs else ())
    norms = iter(squared_norms_of_each([x for own in operands for x in own], len(factors[0].outputs) + 1))
    found = []
    for factor, own, of_factor in zip(factors, operands, terms, strict=True):
        if len(own) == 2:
            found.append(next(norms) * next(norms))
        elif own:
            found.append(next(norms))
        else:
            found.append(factor.joined([next(sums) for _ in of_factor]) if of_factor else factor.squared_norms())
    return found
