"""The storage of one parameter's gradients: as a factor, or written out."""

from __future__ import annotations

from persample.factors.base import Factor
from persample.factors.cost_model import Plan
from persample.factors.dense import Dense


def choose_storage(factor: Factor, plan: Plan) -> Factor:
    """Return the factor, or its gradients written out, as planned.

    Args:
        factor: the gradients of one parameter.
        plan: what the cost model decides by.
    """
    return Dense(factor.materialize(), outputs=factor.outputs) if reason_to_write_out(factor, plan) else factor


def reason_to_write_out(factor: Factor, plan: Plan) -> str:
    """Return why the gradients of a factor are written out, or "" where the factor stays.

    Args:
        factor: the gradients of one parameter.
        plan: what the cost model decides by.
    """
    if plan.always_keeps(factor.num_terms):  # the usual case, without its sizes
        return ""
    return plan.reason_to_write_out(factor.size, is_product=factor.is_product)
