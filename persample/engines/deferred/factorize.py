"""The factors of parameters, from the results of a deferred backward pass; and back, as its input."""

from __future__ import annotations

from torch import Tensor

from persample.engines.deferred.conv import ConvTerm
from persample.engines.deferred.embedding import EmbeddingTerm
from persample.engines.deferred.placeholder import Placeholder
from persample.engines.deferred.product import ProductTerm
from persample.engines.deferred.terms import ComputedTerm, DeferredTerm
from persample.factors.base import Factor
from persample.factors.conv import Conv
from persample.factors.cost_model import Plan
from persample.factors.dense import Dense
from persample.factors.embedding import Embedding
from persample.factors.outer import Outer
from persample.factors.storage import choose_storage
from persample.factors.sum import SumFactor, sum_factors
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


def terms_of(factor: Factor) -> list[DeferredTerm]:
    """Return the terms whose sum are the gradients of a factor, ``[B, *shape]``.

    Args:
        factor: the gradients of one parameter.
    """
    shape = (len(factor), *factor.shape)
    match factor:
        case SumFactor(parts=parts):
            return [term for part in parts for term in terms_of(part)]
        case Outer():
            return [_product_of(factor)]
        case Embedding(signals=signals, index=index) if len(shape) == 3:
            return [EmbeddingTerm(shape, signals, index, shape[1])]
        case Conv(signals=signals, inputs=inputs) if shape[1] == signals.shape[2]:
            sides = [x.movedim(1, 0).flatten(1, 2) for x in (signals, inputs)]
            settings = factor.stride, factor.padding, factor.dilation
            kernels = (shape[0] * shape[1], *shape[2:])
            return [ConvTerm(shape, sides[0], sides[1], kernels, settings, shape[0] * factor.groups)]
    return [ComputedTerm.of(factor.materialize())]


def _product_of(factor: Outer) -> ProductTerm:
    layout, (size, _, num_terms, _) = factor.layout, factor.left.shape
    wide = (size, *layout.groups, *layout.rows, *[1] * len(layout.columns), num_terms)
    long = (size, *layout.groups, *[1] * len(layout.rows), *layout.columns, num_terms)
    dims = (0, *(axis + 1 for axis in layout.order), len(wide) - 1)
    left, right = factor.left.mT.reshape(wide).permute(dims), factor.right.mT.reshape(long).permute(dims)
    return ProductTerm.of(left, right).reshape((size, *layout.shape))
