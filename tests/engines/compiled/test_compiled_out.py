"""``out=`` on every engine, and calls like one before, which are answered at once."""

from __future__ import annotations

import pytest
import torch
from counting import AT_ONCE, functions_entered
from oracle import assert_trees_close
from torch import nn

import persample as ps
from persample import ArgumentError, per_sample_grads
from persample.engines.compiled import clear_cache

X = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
MODEL = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
WANTED = {"rows": ps.Stack(), "update": ps.ClippedMean(0.5)}


def loss(model, x):
    return model(x).sum() ** 2


def leaves(tree):
    return torch.utils._pytree.tree_leaves(tree)


@pytest.mark.parametrize("name", ["eager", "loop", "traced", "compiled"])
def test_out_is_written_again(name):
    out = per_sample_grads(loss, MODEL, X, WANTED, engine=name)
    places = [x.data_ptr() for x in leaves(out)]
    for batch in (2 * X, X - 1, X):
        expected = per_sample_grads(loss, MODEL, batch, WANTED)
        assert per_sample_grads(loss, MODEL, batch, WANTED, engine=name, out=out) is out
        assert_trees_close(out, expected, 1e-9)
    assert [x.data_ptr() for x in leaves(out)] == places


@pytest.mark.parametrize("name", ["eager", "traced", "compiled"])
def test_out_that_is_also_read(name):
    """The gradient of w·x is x: rows are written into the batch only after everything was read."""
    batch = X.clone()
    expected = per_sample_grads(lambda w, x: (w @ x) ** 2, torch.ones(4).double(), batch)
    result = per_sample_grads(lambda w, x: (w @ x) ** 2, torch.ones(4).double(), batch, engine=name, out=batch)
    assert result is batch
    assert_trees_close(batch, expected, 1e-9)


def test_out_that_is_a_direction():
    w = torch.ones(4).double()
    out = per_sample_grads(lambda w, x: (w @ x) ** 2, w, X, ps.Mean())
    wanted = {"update": ps.Mean(), "dots": ps.Dot(out)}
    expected = per_sample_grads(lambda w, x: (w @ x) ** 2, w, X, wanted)
    into = {"update": out, "dots": torch.zeros(5).double()}
    assert_trees_close(
        per_sample_grads(lambda w, x: (w @ x) ** 2, w, X, wanted, engine="compiled", out=into), expected, 1e-9
    )


def test_out_that_does_not_fit():
    with pytest.raises(ArgumentError, match=r"out: expected shape \[4\]"):
        per_sample_grads(lambda w, x: w @ x, torch.ones(4), X.float(), ps.Sum(), engine="compiled", out=torch.zeros(3))


@pytest.mark.parametrize(("module", "reuses"), [(False, False), (True, True)])
def test_a_call_like_one_before_is_answered_at_once(module, reuses):
    clear_cache()
    params = MODEL if module else dict(MODEL.named_parameters())
    value = loss if module else lambda p, x: torch.func.functional_call(MODEL, p, x).sum() ** 2

    def call(bound, batch):
        return per_sample_grads(value, params, batch, ps.ClippedMean(bound), engine="compiled", out=out)

    out = per_sample_grads(value, params, X, ps.ClippedMean(1.0), engine="compiled") if reuses else None
    call(1.0, X)
    for bound, batch in ((1.0, X), (0.1, X + 1), (2, X)):
        expected = per_sample_grads(value, params, batch, ps.ClippedMean(bound))
        found, entered = functions_entered(call, bound, batch)
        assert entered.total() < AT_ONCE
        assert_trees_close(found, expected, 1e-9)
