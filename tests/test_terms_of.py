"""Factors as the input of a deferred backward pass: the gradients that they stand for, and the factors they become."""

from __future__ import annotations

import pytest
import torch

from persample.engines.deferred import Deferral, factor_of
from persample.engines.deferred.factorize import terms_of
from persample.factors import Conv, Dense, Embedding, Outer, sum_factors
from persample.factors.cost_model import Plan
from persample.factors.layout import Layout

F64 = torch.float64


def draw(*shape):
    return torch.randn(*shape, dtype=F64)


def conv(groups=1):
    return Conv(draw(2, 3, 4, 5), draw(2, 3, 6, 6), (4, 6 // groups, 2), (1,), (0,), (1,), groups)


def outer(terms):
    return Outer(draw(2, 1, terms, 4), draw(2, 1, terms, 3), Layout.of_matrix(4, 3), F64)


FACTORS = {
    "dense": lambda: Dense(draw(2, 4, 3)),
    "a number": lambda: Dense(draw(2)),
    "products": lambda: outer(5),
    "one product": lambda: outer(1),
    "transposed products": lambda: Outer(
        draw(2, 1, 5, 4), draw(2, 1, 5, 3), Layout((), (4,), (3,), (1, 0), (3, 4)), F64
    ),
    "products of groups": lambda: Outer(
        draw(2, 2, 5, 4), draw(2, 2, 5, 6), Layout((2,), (4,), (3, 2), (1, 0, 3, 2), (8, 2, 3)), F64
    ),
    "lookups": lambda: Embedding(draw(2, 5, 3), torch.randint(7, (2, 5)), (7, 3)),
    "a convolution": conv,
    "a convolution of groups": lambda: conv(groups=2),
    "patches of a convolution": lambda: conv().patches(),
    "a sum": lambda: sum_factors([outer(5), Embedding(draw(2, 5, 3), torch.randint(4, (2, 5)), (4, 3))]),
    "two convolutions": lambda: sum_factors(
        [conv(), Conv(draw(2, 3, 4, 4), draw(2, 3, 6, 6), (4, 6, 2), (1,), (0,), (2,), 1)]
    ),
}


@pytest.mark.parametrize("kind", FACTORS)
def test_terms_add_up_to_the_gradients(kind):
    factor = FACTORS[kind]()
    total = sum(term.compute(F64) for term in terms_of(factor))
    torch.testing.assert_close(total, factor.materialize())


@pytest.mark.parametrize("kind", FACTORS)
def test_half_of_what_was_deferred_is_a_factor(kind):
    factor = FACTORS[kind]()
    plan = Plan(frozenset())
    mode = Deferral(plan, [])
    with mode:
        half = mode.deferred(factor) / 2
    torch.testing.assert_close(factor_of(half, plan).materialize(), factor.materialize() / 2)
