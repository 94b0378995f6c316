"""The storage of one parameter's gradients: as a factor, or written out."""

from __future__ import annotations

import math
from collections.abc import Iterable

from persample.factors import cost_model
from persample.factors.base import Factor
from persample.factors.conv import Conv
from persample.factors.dense import Dense


def choose_storage(factor: Factor, required_ops: Iterable[str]) -> Factor:
    """Return the factor, or its gradients written out, whichever the cost model prefers.

    Args:
        factor: the gradients of one parameter.
        required_ops: the operations of ``Factor`` that the reductions call.
    """
    written = len(factor) * math.prod(factor.shape)
    by_gram = not isinstance(factor, Conv) or factor.by_gram
    kept = cost_model.keeps_product(required_ops, factor.num_terms, written, factor.stored, by_gram=by_gram)
    return factor if kept else Dense(factor.materialize())
