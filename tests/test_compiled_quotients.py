"""Averages in compiled code: no pass over a result that is larger than the operands of its product."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from traced import lowered

from persample import Aux, ClippedMean, Mean, clear_cache, per_sample_grads
from persample.engines.compiled.quotients import divide_operands

aten = torch.ops.aten
A, B, N = torch.randn(3, 40), torch.randn(3, 50), torch.tensor(7.0, dtype=torch.float64)

# Which sizes are divided, before and after.
REWRITTEN = {
    "left": (lambda a, b, n: (a.t() @ b) / n, 2000, 120),
    "right": (lambda a, b, n: (b.t() @ a) / n, 2000, 120),
    "views": (lambda a, b, n: (a.t() @ b).view(8, 5, 50).permute(2, 0, 1) / n, 2000, 120),
    "a number": (lambda a, b, n: (a.t() @ b) / 7.0, 2000, 120),
    "a number that comes later": (lambda a, b, n: (a.t() @ b) / (n * n).sqrt(), 2000, 120),
}
KEPT = {
    "smaller than its operands": lambda a, b, n: (a @ a.t()) / n,
    "as large": lambda a, b, n: (b[:, :3] @ b[:, 3:6]) / n,
    "used elsewhere": lambda a, b, n: (y := a.t() @ b) / n + y,
    "whose view is used elsewhere": lambda a, b, n: (y := (a.t() @ b).view(50, 40)) / n + y,
    "by a row": lambda a, b, n: (a.t() @ b) / b[0],
    "no product": lambda a, b, n: (a.exp() + 1) / n,
    "in a loss": lambda a, b, n: ((a.t() @ b) / n).floor(),
    "in a loss, and a result": lambda a, b, n: ((y := (a.t() @ b) / n), y.floor()),
    "by a complex number": lambda a, b, n: (a.t() @ b) / torch.complex(n, n),
}


def divided(graph):
    graph.graph.eliminate_dead_code()
    return [node.meta["val"].numel() for node in graph.graph.find_nodes(op="call_function", target=aten.div.Tensor)]


@pytest.mark.parametrize("name", REWRITTEN)
def test_the_smaller_operand_is_divided(name):
    function, before, after = REWRITTEN[name]
    graph = make_fx(function, tracing_mode="fake")(A, B, N)
    assert divided(graph) == [before]
    divide_operands(graph)
    assert divided(graph) == [after]
    graph.recompile()
    torch.testing.assert_close(graph(A, B, N), function(A, B, N))


@pytest.mark.parametrize("function", KEPT.values(), ids=KEPT)
def test_others_stay(function):
    graph = make_fx(function, tracing_mode="fake")(A, B, N)
    before = graph.code
    divide_operands(graph)
    graph.recompile()
    assert graph.code == before


def test_sizes_that_no_trace_knows_are_not_compared():
    graph = make_fx(lambda a, b: ((a @ b.t()) / 7.0, (a @ b.t()) / len(a)), tracing_mode="symbolic")(A.t(), B.t())
    env = graph.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode.shape_env
    guards = len(env.guards)
    divide_operands(graph)
    assert len(env.guards) == guards
    assert all(isinstance(size, torch.SymInt) for size in divided(graph))


def test_losses_round_as_they_are_written(monkeypatch):
    """In float32, 41 / 41 is 1, and 41 times 1 / 41 is less."""
    graphs = lowered(monkeypatch)
    w, x = torch.tensor([[41.0, 0.0]]).repeat(50, 1), torch.tensor([1.0, 0.0]).repeat(3, 2, 1)
    loss = lambda w, x: (w.sum(), (F.linear(x, w) / 41).floor())
    _, floors = per_sample_grads(loss, w, x, (Mean(), Aux()), engine="compiled")
    assert torch.equal(floors, torch.ones(3, 2, 50))
    assert 300 in [size for graph in graphs for size in divided(graph)]
    clear_cache()


@pytest.mark.parametrize("weights", [None, torch.tensor([1.0, 0.5, 0.0])])
@pytest.mark.parametrize("reduction", [Mean(), ClippedMean(0.5)])
def test_averages(reduction, weights, monkeypatch):
    graphs = lowered(monkeypatch)
    params = {"w": torch.randn(50, 40), "b": torch.randn(50)}
    loss = lambda p, x: (p["w"] @ x + p["b"]).sin().sum()
    expected = per_sample_grads(loss, params, A, reduction, weights=weights)
    actual = per_sample_grads(loss, params, A, reduction, weights=weights, engine="compiled")
    torch.testing.assert_close(actual, expected)
    assert 0 < max(size for graph in graphs for size in divided(graph)) <= 150
    clear_cache()
