"""The factors of parameters, from the results of a deferred backward pass."""

from __future__ import annotations

from torch import Tensor

from persample.engines.deferred.placeholder import Placeholder
from persample.factors.base import Factor
from persample.factors.cost_model import Plan
from persample.factors.dense import Dense
from persample.factors.storage import choose_storage
from persample.factors.sum import sum_factors
from persample.utils.dtypes import as_real


def factor_of(grad: Tensor, plan: Plan) -> Factor:
    """Return the factor of one parameter, stored as planned.

    Args:
        grad: the gradients ``[B, *shape]``, a placeholder or not.
        plan: how gradients are stored.
    """
    factor = _deferred_factor(grad) if isinstance(grad, Placeholder) else None
    if factor is not None:
        return choose_storage(factor, plan)
    return Dense(as_real(grad.value("the result") if isinstance(grad, Placeholder) else grad))


def _deferred_factor(grad: Placeholder) -> Factor | None:
    terms = grad.terms()
    if terms is None:
        return None
    if not terms:
        return Dense.zeros(len(grad), grad.shape[1:], grad.dtype, grad.device)
    factors = [factor for term in terms if (factor := term.factor(grad.dtype)) is not None]
    return sum_factors(factors) if len(factors) == len(terms) else None
