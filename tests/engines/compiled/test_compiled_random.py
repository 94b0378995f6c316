"""Random operations in compiled programs: what ``randomness=`` says, from the global seed."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_trees_close
from torch import nn
from torch.nn import functional as F

import persample as ps
from persample import per_sample_grads

F64 = torch.float64
W, X = torch.randn(40, dtype=F64), torch.randn(6, 40, dtype=F64)
WANTED = {"stack": ps.Stack(), "mean": ps.Mean(), "aux": ps.Aux()}


def loss(w, x):
    """Return a loss whose gradient is mask * x, and the mask."""
    mask = F.dropout(torch.ones_like(x), 0.5)
    return (mask * w * x).sum(), {"mask": mask, "noise": torch.rand_like(x)}


def results(seed, randomness="different", **options):
    torch.manual_seed(seed)
    return per_sample_grads(loss, W, X, WANTED, engine="compiled", randomness=randomness, **options)


def is_one_row(rows):
    return torch.equal(rows, rows[:1].expand_as(rows))


@pytest.mark.parametrize("options", [{}, {"chunk_size": 4}], ids=["whole", "chunks"])
def test_different(options):
    first, again, other = (results(seed, **options) for seed in (1, 1, 2))
    after = per_sample_grads(loss, W, X, WANTED, engine="compiled", randomness="different", **options)
    mask = first["aux"]["mask"]
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    assert len(mask.unique(dim=0)) == len(first["aux"]["noise"].unique(dim=0)) == len(X)
    assert_trees_close(first["stack"], mask * X, 1e-12)  # the backward pass used the very masks of the forward
    assert_trees_close(first["mean"], (mask * X).mean(0), 1e-12)
    assert_trees_close(again, first, 0)
    assert not torch.equal(other["aux"]["mask"], mask)
    assert not torch.equal(after["aux"]["mask"], other["aux"]["mask"])  # the stream moves on


@pytest.mark.parametrize("options", [{}, {"chunk_size": 4}], ids=["whole", "chunks"])
def test_same(options):
    first, again, other = (results(seed, "same", **options) for seed in (1, 1, 2))
    after = per_sample_grads(loss, W, X, WANTED, engine="compiled", randomness="same", **options)
    mask = first["aux"]["mask"]
    assert is_one_row(mask)
    assert is_one_row(first["aux"]["noise"])
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    assert_trees_close(first["stack"], mask * X, 1e-12)
    assert_trees_close(again, first, 0)
    assert not torch.equal(other["aux"]["mask"], mask)
    assert not torch.equal(after["aux"]["mask"], other["aux"]["mask"])


def test_error():
    for _ in range(2):
        with pytest.raises(ps.LossError, match="draws random numbers, which randomness='error' refuses"):
            per_sample_grads(loss, W, X, WANTED, engine="compiled")


def test_the_rates_are_right():
    torch.manual_seed(0)
    masks = torch.stack([results(seed)["aux"]["mask"] for seed in range(30)])
    assert abs(masks.mean().item() - 1) < 0.05  # 7200 coins of variance 1: more than four deviations
    assert torch.corrcoef(masks.flatten(1)).fill_diagonal_(0).abs().max() < 0.3


def test_dropout_of_a_module():
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(40, 1, dtype=F64))

    def of_net(net, x):
        return net(x).sum()

    torch.manual_seed(0)
    first, second = (
        per_sample_grads(of_net, net, X, engine="compiled", randomness="different")["1.weight"] for _ in range(2)
    )
    ratio = first.squeeze(1) / X
    assert set(ratio.round(decimals=9).unique().tolist()) == {0.0, 2.0}
    assert len(ratio.unique(dim=0)) == len(X)
    assert not torch.equal(first, second)
    net.eval()
    assert_trees_close(
        per_sample_grads(of_net, net, X, engine="compiled", randomness="different")["1.weight"], X[:, None], 1e-12
    )


def test_compiling_leaves_the_stream_where_an_engine_that_draws_nothing_leaves_it():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    per_sample_grads(lambda w, x: (w @ x) ** 2, W, X, ps.Mean(), engine="compiled", randomness="different")
    assert torch.equal(before, torch.get_rng_state())
