"""From what a deferred backward pass left to the factors of the parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from persample.factors import plan
from persample.factors.conv import Conv
from persample.factors.defer.placeholder import Placeholder
from persample.factors.dense import Dense
from persample.factors.protocol import Factor
from persample.factors.total import total
from persample.numeric import as_real


def factor_of(grad: Tensor, uses: Iterable[str]) -> Factor:
    """Return the factor of one parameter, in the form that suits what is asked of it.

    Args:
        grad: the gradients ``[B, *shape]``, perhaps a placeholder.
        uses: the operations of ``Factor`` that the reductions call.
    """
    factor = _factor(grad) if isinstance(grad, Placeholder) else None
    if factor is None:
        values = grad.value("the result") if isinstance(grad, Placeholder) else grad
        return Dense(as_real(values))
    return suited(factor, uses)


def suited(factor: Factor, uses: Iterable[str]) -> Factor:
    """Return a factor, or its gradients written out, as suits what is asked of it.

    Args:
        factor: a product.
        uses: the operations of ``Factor`` that the reductions call.
    """
    written = len(factor) * math.prod(factor.shape)
    by_gram = not isinstance(factor, Conv) or factor.by_gram
    kept = plan.keeps_product(uses, factor.steps, written, factor.stored, by_gram=by_gram)
    return factor if kept else Dense(factor.materialize())


def _factor(grad: Placeholder) -> Factor | None:
    terms = grad.terms()
    if terms is None:
        return None
    if not terms:
        return Dense.zeros(len(grad), grad.shape[1:], grad.dtype, grad.device)
    factors = [term.factor(grad.dtype) for term in terms]
    kept = [factor for factor in factors if factor is not None]
    return total(kept) if len(kept) == len(factors) else None
