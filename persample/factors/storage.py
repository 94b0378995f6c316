"""The storage of one parameter's gradients: as a factor, or written out."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from persample.factors import cost_model
from persample.factors.base import Factor
from persample.factors.dense import Dense


def choose_storage(factor: Factor, required_ops: Iterable[str]) -> Factor:
    """Return the factor, or its gradients written out, whichever the cost model prefers.

    Args:
        factor: the gradients of one parameter.
        required_ops: the operations of ``Factor`` that the reductions call.
    """
    return Dense(factor.materialize()) if reason_to_write_out(factor, required_ops) else factor


def reason_to_write_out(factor: Factor, required_ops: Iterable[str]) -> str:
    """Return why the gradients of a factor are written out, or "" where the factor stays.

    Args:
        factor: the gradients of one parameter.
        required_ops: the operations of ``Factor`` that the reductions call.
    """
    written, costly = len(factor) * prod(factor.shape), factor.is_costly_to_square
    return cost_model.reason_to_write_out(
        required_ops, factor.num_terms, written, factor.stored, costly_to_square=costly
    )
