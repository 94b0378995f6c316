"""From what a deferred backward pass left to the factors of the parameters."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from persample.engines.deferred.placeholder import Placeholder
from persample.factors.base import Factor
from persample.factors.dense import Dense
from persample.factors.storage import choose_storage
from persample.factors.sum import sum_factors
from persample.utils.dtypes import as_real


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
    return choose_storage(factor, uses)


def _factor(grad: Placeholder) -> Factor | None:
    terms = grad.terms()
    if terms is None:
        return None
    if not terms:
        return Dense.zeros(len(grad), grad.shape[1:], grad.dtype, grad.device)
    factors = [term.factor(grad.dtype) for term in terms]
    kept = [factor for factor in factors if factor is not None]
    return sum_factors(kept) if len(kept) == len(factors) else None
