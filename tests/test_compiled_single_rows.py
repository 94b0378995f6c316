"""Losses whose layers see matrices of one row: compiled as those that see the row, with the numbers of the loop."""

from __future__ import annotations

import pytest
import torch
from torch.func import vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from traced import lowered, without_inductor

from persample import ClippedMean, Stack, clear_cache, per_sample_grads
from persample.engines.compiled.single_rows import take_rows

F64 = torch.float64


@pytest.fixture
def params():
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (3, 5), "b": (3,), "v": (1, 3)}
    return {name: torch.randn(shape, dtype=F64, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def x():
    return torch.randn(4, 5, dtype=F64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _fresh():
    clear_cache()


def written_row(p, x):
    y = F.linear(x[None], p["w"], p["b"])
    y[0].mul_(2)
    return y.sin()


def written_output(p, x):
    y = F.linear(x[None], p["w"], p["b"])
    z = y.T
    y.mul_(2)
    return y.sin().sum() + z.cos()


def autocast(p, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.addmm(p["b"].float(), x[None].float(), p["w"].T.float())[0]
        return y.tanh() + F.linear(x[None].float(), p["w"].float(), p["b"].float())[0]


LOSSES = {
    "linear": lambda p, x: F.linear(x[None], p["w"], p["b"])[0].tanh(),
    "linear without bias": lambda p, x: F.linear(x[None], p["w"])[0].tanh(),
    "linear by name": lambda p, x: F.linear(x[None], weight=p["w"], bias=p["b"])[-1].tanh(),
    "linear with a matrix": lambda p, x: F.linear(x[None], p["w"], p["b"][None])[0, 1].tanh(),
    "linear of two rows": lambda p, x: F.linear(torch.stack([x, x.sin()]), p["w"], p["b"])[0].tanh(),
    "linear of one row of a batch": lambda p, x: F.linear(x[None, None], p["w"], p["b"])[0, 0].tanh(),
    "rows of weights": lambda p, x: F.linear(p["v"], p["w"].T, x)[0].tanh(),
    "addmm": lambda p, x: torch.addmm(p["b"], x[None], p["w"].T)[0].tanh(),
    "addmm of a matrix": lambda p, x: torch.addmm(p["b"][None], x[None], p["w"].T)[0, 1].tanh(),
    "addmm of a number": lambda p, x: torch.addmm(p["b"].sum(), x[None], p["w"].T)[0].tanh(),
    "addmm of a row for one number": lambda p, x: torch.addmm(p["b"][:1], x[None], p["w"].T)[0].tanh(),
    "addmm with factors": lambda p, x: torch.addmm(p["b"], x[None], p["w"].T, beta=2, alpha=3)[0].tanh(),
    "addmm of two rows": lambda p, x: torch.addmm(p["b"], torch.stack([x, x]), p["w"].T)[0].tanh(),
    "index of a parameter": lambda p, x: p["v"][0] * p["b"] * x.sum(),
    "index that adds an axis": lambda p, x: p["v"][True][0, 0] * F.linear(x, p["w"]),
    "slice": lambda p, x: p["v"][:1].T @ x[None],
    "index of rows": lambda p, x: F.linear(x[None], p["w"], p["b"])[None][0][0].tanh(),
    "index of a tuple": lambda p, x: F.linear(x[None], p["w"], p["b"]).split(2, -1)[0],
    "written row": written_row,
    "written output": written_output,
    "autocast": autocast,
    "in a checkpoint": lambda p, x: checkpoint(
        lambda x: F.linear(x[None], p["w"], p["b"])[0].tanh(), x, use_reentrant=False
    ),
    "in a vmap": lambda p, x: vmap(lambda c: F.linear(c * x[None], p["w"], p["b"])[0].tanh())(x),
    "of an inner vmap alone": lambda p, x: vmap(lambda row: F.linear(row[None], p["w"], p["b"])[0].tanh())(x[None]),
}


def loss_of(output):
    def loss(p, x):
        y = output(p, x)
        return (y * torch.linspace(1, 2, y.numel()).view(y.shape)).sum()

    return loss


@pytest.mark.parametrize("output", LOSSES)
def test_losses(output, params, x, monkeypatch):
    without_inductor(monkeypatch)
    expected, found = (
        per_sample_grads(loss_of(LOSSES[output]), params, x, Stack(), engine=engine) for engine in ("loop", "compiled")
    )
    tolerance = 1e-2 if output == "autocast" else 1e-9
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_results_keep_their_dtype(params, x):
    """Under autocast the result of a layer has another dtype than its bias."""
    graphs = []
    params, x = {name: p.float() for name, p in params.items()}, x[:1].float()

    def layers(w, b, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.addmm(b, x, w.T), F.linear(x, w, b)

    inputs = params["w"], params["b"], x
    torch.compile(layers, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)(*inputs)
    take_rows(graphs[0])
    graphs[0].recompile()
    assert [y.dtype for y in graphs[0](*inputs)] == [torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("output", ["linear", "addmm"])
def test_the_program_is_that_of_the_row(output, params, x, monkeypatch):
    graphs = lowered(monkeypatch)
    losses = [loss_of(LOSSES[output]), loss_of(lambda p, x: F.linear(x, p["w"], p["b"]).tanh())]
    for loss in losses:
        per_sample_grads(loss, params, x, ClippedMean(1.0), engine="compiled")
    of_matrix, of_row = ([str(node.target) for node in graph.graph.nodes] for graph in graphs)
    for operation in ("aten.sum.dim_IntList", "aten.mm.default", "aten.select_scatter.default", "aten.mul.Tensor"):
        assert of_matrix.count(operation) == of_row.count(operation)
    assert "aten.mm.default" in of_row


def test_products_of_vectors_have_a_row_for_each_sample(monkeypatch):
    graphs = lowered(monkeypatch)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    per_sample_grads(lambda m, x: m(x).sum(), model, torch.randn(7, 5), Stack(), engine="compiled")
    products = graphs[0].graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert products
    assert all(node.meta["val"].shape[0] == 7 for node in products)


def test_keep_batch_dim(params, x):
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    expected, found = (
        per_sample_grads(lambda m, x: m(x).squeeze(), model, x, ClippedMean(0.1), keep_batch_dim=True, engine=engine)
        for engine in ("loop", "compiled")
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
