"""One compiled program for many sizes: results equal eager at every size, and compilations are counted."""

from __future__ import annotations

import random

import pytest
import torch
from oracle import assert_trees_close
from torch import nn

import persample as ps
from persample import per_sample_grads, stop_gradient
from persample.engines.compiled import clear_cache, program
from persample.engines.compiled.programs import compilations

F64 = torch.float64
SIZES = [2, 1000, 3, 5, 8, 26, 33, *random.Random(0).sample(range(40, 1000), 13)]  # small ones too
WANTED = {"update": ps.ClippedMean(0.5), "norms": ps.Norm()}


@pytest.fixture(autouse=True)
def _fresh():
    clear_cache()


@pytest.fixture
def _traced_only(monkeypatch):
    """Run the traced graph as it is: enough to compare numbers at many sizes, and Inductor takes seconds."""
    monkeypatch.setattr(program, "lower", lambda graph, *_: lambda tensors: graph(*tensors))


@pytest.fixture(scope="module")
def value():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def td(value, s_tm1, r_t, s_t):
    return (r_t + 0.9 * stop_gradient(value(s_t)) - value(s_tm1)).square().sum()


def agree(loss, params, batch, wanted=WANTED, **options):
    expected = per_sample_grads(loss, params, batch, wanted, **options)
    actual = per_sample_grads(loss, params, batch, wanted, engine="compiled", **options)
    assert_trees_close(actual, expected, 1e-9)


def test_twenty_batch_sizes(value):
    for size in SIZES:
        shapes = (size, 4), (size,), (size, 4)
        agree(td, value, tuple(torch.randn(*shape, dtype=F64) for shape in shapes))
    assert compilations() <= 2
    for size in (1, 3, 1):  # one sample alone is another program
        agree(td, value, tuple(torch.randn(*shape, dtype=F64) for shape in ((size, 4), (size,), (size, 4))))
    assert compilations() <= 3


def test_twenty_pairs_of_batch_size_and_episode_length(value):
    def loss(value, obs_t, return_t, mask_t):
        return (mask_t * (value(obs_t).squeeze(-1) - return_t) ** 2).sum() / mask_t.sum()

    lengths = random.Random(1).sample(range(2, 60), 20)
    for size, length in zip([3, 3, *sorted(SIZES)[:18]], lengths, strict=True):  # the length alone, then both
        mask = torch.arange(length) < 1 + torch.arange(size)[:, None] % length
        batch = torch.randn(size, length, 4, dtype=F64), torch.randn(size, length, dtype=F64), mask
        agree(loss, value, batch)
    assert compilations() <= 3  # one size, another length, another number of episodes


@pytest.mark.usefixtures("_traced_only")
def test_a_loss_that_branches_on_the_length():
    def loss(w, x):
        y = x @ w
        return y.sum() if len(x) > 5 else len(x) * y.square().sum()

    w = torch.randn(3, dtype=F64)
    for size, length in ((3, 4), (3, 5), (3, 9), (3, 6), (4, 7), (4, 4), (7, 5), (7, 12)):
        agree(loss, w, torch.randn(size, length, 3, dtype=F64), (ps.Sum(), ps.Norm()))


@pytest.mark.usefixtures("_traced_only")
def test_a_batch_size_that_equals_another_size():
    """A size that happens to be that of a parameter, or of the directions, must not be taken for it."""
    w = torch.randn(5, 3, dtype=F64)
    directions = torch.randn(6, 5, 3, dtype=F64)
    for size in (5, 3, 6, 15, 7):
        batch = torch.randn(size, 3, dtype=F64)
        agree(lambda w, x: (w @ x).square().sum(), w, batch, (ps.Dot(directions, stacked=True), ps.Mean(), ps.Gram()))
    assert compilations() <= 2


@pytest.mark.usefixtures("_traced_only")
def test_one_sample_does_not_spoil_the_others(value):
    for size in (4, 1, 5, 6, 9, 17, 40):
        agree(td, value, tuple(torch.randn(*shape, dtype=F64) for shape in ((size, 4), (size,), (size, 4))))
    assert compilations() <= 3


@pytest.mark.usefixtures("_traced_only")
def test_sizes_of_chunks(value):
    for size in (7, 8, 11):
        batch = tuple(torch.randn(*shape, dtype=F64) for shape in ((size, 4), (size,), (size, 4)))
        agree(td, value, batch, chunk_size=4)
    assert compilations() <= 3  # 4, then any size, then 1 never


EVERYTHING = {
    "mean": ps.ClippedMean(0.5),
    "norms": ps.Norm(per_param=True),
    "gram": ps.Gram(),
    "stack": ps.Stack(),
    "variance": ps.Variance(0),
    "losses": ps.Loss(),
    "aux": ps.Aux(),
}


@pytest.mark.usefixtures("_traced_only")
def test_a_model_that_freezes_the_batch_size_is_filled_up():
    conv = nn.Conv1d(1, 2, 2, dtype=F64)

    def loss(conv, x):
        y = conv(x)
        return y.square().sum(), {"y": y}

    for size in (5, 7, 6, 5, 8):
        agree(loss, conv, (torch.randn(size, 1, 3, dtype=F64),), EVERYTHING)
    assert compilations() <= 3  # 5 as it is, 8 for what is filled up, 8 as it is
    batch, weights = torch.randn(6, 1, 3, dtype=F64), torch.tensor([1.0, 0.0, 2.0, 1.0, 0.5, 0.0])
    for size in (5, 6):
        wanted = {name: reduction for name, reduction in EVERYTHING.items() if name != "stack"}
        agree(loss, conv, (batch[:size],), wanted, weights=weights[:size])


@pytest.mark.usefixtures("_traced_only")
def test_a_frozen_family_tries_only_once_to_serve_all_sizes(monkeypatch):
    tried = []
    monkeypatch.setattr(cache, "dynamic", lambda *_: tried.append(1))
    w = torch.randn(3, dtype=F64)
    for size in (4, 8, 16, 32):
        agree(lambda w, x: w @ x, w, torch.randn(size, 3, dtype=F64), ps.Sum())
    assert len(tried) == 1
