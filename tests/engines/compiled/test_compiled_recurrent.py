"""Recurrent layers in compiled programs: long sequences are loops, with the numbers of the plain steps."""

from __future__ import annotations

import pytest
import torch
from compiler import calls_in_cpp, compilations, lowered, without_compiling
from oracle import assert_trees_close
from torch import nn

from persample import ClippedMean, Norm, Stack, per_sample_grads
from persample.engines.compiled import clear_cache

F64 = torch.float64
LAYERS = {
    "gru": lambda: nn.GRU(3, 4, batch_first=True),
    "gru without biases, two layers": lambda: nn.GRU(3, 4, num_layers=2, bias=False, batch_first=True),
    "lstm of both directions": lambda: nn.LSTM(3, 4, bidirectional=True, batch_first=True),
    "lstm with projections": lambda: nn.LSTM(3, 4, proj_size=2, batch_first=True),
    "rnn": lambda: nn.RNN(3, 4, nonlinearity="relu", batch_first=True),
}
WANTED = {"update": ClippedMean(0.5), "norms": Norm(), "all": Stack()}


def model_of(kind):
    torch.manual_seed(0)
    return LAYERS[kind]().double()


def loss(model, x):
    return model(x)[0].square().sum()


def loss_of_the_last_state(model, x, initial):
    return model(x, initial)[1].sin().sum()


def agree(loss, model, batch, wanted=WANTED):
    actual = per_sample_grads(loss, model, batch, wanted, engine="compiled")
    assert_trees_close(actual, per_sample_grads(loss, model, batch, wanted, engine="loop"), 1e-9)


@pytest.mark.parametrize(("kind", "length"), [*((kind, 23) for kind in LAYERS), ("gru", 1)])
def test_lengths(kind, length, monkeypatch):
    without_compiling(monkeypatch)
    clear_cache()
    agree(loss, model_of(kind), torch.randn(3, length, 3, dtype=F64), WANTED if kind == "gru" else Norm())


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("gru", WANTED["update"]),
        *(pytest.param(kind, WANTED, marks=pytest.mark.slow) for kind in ("gru", "lstm of both directions")),
    ],
)
def test_compiled_loops(kind, wanted):
    # The initial state is made by the layer: zeros whose rows share memory.
    agree(loss, model_of(kind), torch.randn(3, 22, 3, dtype=F64), wanted)


@pytest.mark.parametrize(("length", "in_cpp"), [(2, True), (22, False)])
def test_programs_without_loops_call_their_kernels_from_cpp(length, in_cpp, monkeypatch):
    """In C++, a loop frees some of its inputs twice, and the process ends."""
    found = calls_in_cpp(monkeypatch)
    clear_cache()
    agree(loss, model_of("gru"), torch.randn(3, length, 3, dtype=F64), Norm())
    assert found == [in_cpp]


def test_compiled_loop_from_a_given_state():
    batch = torch.randn(3, 21, 3, dtype=F64), torch.randn(3, 1, 4, dtype=F64)
    agree(loss_of_the_last_state, model_of("gru"), batch, ClippedMean(0.5))


@pytest.mark.slow
def test_one_loop_serves_all_batch_sizes():
    clear_cache()
    model = model_of("gru")
    for size in (4, 7, 30, 3):
        agree(loss, model, torch.randn(size, 22, 3, dtype=F64), ClippedMean(0.5))
    assert compilations() == 2


def test_programs_do_not_grow_with_the_sequence(monkeypatch):
    clear_cache()
    graphs = lowered(monkeypatch)
    for length in (25, 30):
        agree(loss, model_of("gru"), torch.randn(2, length, 3, dtype=F64), ClippedMean(0.5))
    first, second = graphs
    assert len(first.graph.nodes) == len(second.graph.nodes)


def test_one_sample(monkeypatch):
    # The layer cuts its initial state out of a longer tensor: strides of an axis of one sample are arbitrary.
    without_compiling(monkeypatch)
    agree(loss, model_of("gru"), torch.randn(1, 21, 3, dtype=F64), Norm())
