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
    terms = [None if own else factor.term_operands for factor, own in zip(factors, operands, strict=True)]
    pairs = [pair for pair in terms if pair is not None]
    sums = iter(squared_norms_of_sums(pairs) if pairs else ())
    norms = iter(squared_norms_of_each([x for own in operands for x in own]))
    found = []
    for factor, own, pair in zip(factors, operands, terms, strict=True):
        if len(own) == 2:
            found.append(next(norms) * next(norms))
        elif own:
            found.append(next(norms))
        else:
            found.append(factor.squared_norms() if pair is None else next(sums))
    return found
