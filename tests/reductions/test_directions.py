"""Projections and sketches: what they are on average, what they read, and what they reject."""

from __future__ import annotations

import pytest
import torch
from grid import REDUCTIONS
from oracle import assert_trees_close, oracle
from torch.utils import _pytree as pytree
from workloads import build

import persample as ps
from persample import ArgumentError, accumulate, per_sample_grads
from persample.factors import Conv, Embedding, Outer

SEEDS = 400


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def products(rows):
    """Inner products of rows [B, n]."""
    return rows @ rows.T


KINDS = {
    "Project": lambda seed: ps.Project(9, seed),
    "Sketch": lambda seed: ps.Sketch(3, seed),
    "Sketch-total": lambda seed: ps.Sketch(3, seed, per_param=False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workload", ["mlp_td", "cnn_group_norm", "tied_weights", "complex_params"])
def test_inner_products_are_those_of_gradients_on_average(workload, kind):
    work = build(workload)
    wanted = {seed: KINDS[kind](seed) for seed in range(SEEDS)} | {"factors": ps.Factored()}
    found = per_sample_grads(work.loss_fn, work.params, work.batch, wanted)
    factors = pytree.tree_leaves(found.pop("factors"), is_leaf=lambda x: hasattr(x, "gram"))
    grams = [factor.gram() for factor in factors]
    expected = grams if kind == "Sketch" else [sum(grams)]
    estimates = zip(*([products(x) for x in pytree.tree_leaves(rows)] for rows in found.values()), strict=True)
    for exact, drawn in zip(expected, map(torch.stack, estimates), strict=True):
        error = drawn.std(0) / SEEDS**0.5 + 1e-12
        assert ((drawn.mean(0) - exact).abs() < 5 * error).all()


def test_sketches_are_less_precise_than_as_many_projections():
    w, x = draw(30, 20), draw(2, 20)
    wanted = {seed: (ps.Project(64, seed), ps.Sketch(8, seed)) for seed in range(200)}
    found = per_sample_grads(lambda w, x: torch.tanh(w @ x).sum(), w, x, wanted)
    exact = per_sample_grads(lambda w, x: torch.tanh(w @ x).sum(), w, x, ps.Norm()).square()
    projected, sketched = (
        torch.stack([pair[which].square().sum(1) / exact - 1 for pair in found.values()]).square().mean().sqrt()
        for which in (0, 1)
    )
    assert 0.2 < projected < 0.5  # √8 / 8 = 0.35
    assert 0.4 < sketched < 1.0  # √(4 / 8 + 4 / 64) = 0.75


@pytest.mark.parametrize(
    "factor",
    [
        Outer(draw(4, 1, 3, 6), draw(4, 1, 3, 5), (6, 5), torch.float64),
        Outer(draw(4, 2, 3, 3), draw(4, 2, 3, 5), (6, 5), torch.float64),
        Embedding(draw(4, 3, 5), torch.tensor([0, 2, 2]).expand(4, 3), (6, 5)),
        Conv(draw(4, 2, 6, 4), draw(4, 2, 4, 5), (6, 2, 2), (1,), (0,), (1,), 2),
    ],
    ids=["outer", "groups", "embedding", "conv"],
)
@pytest.mark.parametrize("operation", ["project", "sketch"])
def test_gradients_are_not_written_out(factor, operation, monkeypatch):
    columns = torch.Size(factor.shape[1:]).numel()
    signs = torch.ones(7, factor.shape[0]), torch.ones(7, columns)
    total = factor.materialize().flatten(1).sum(1)
    with monkeypatch.context() as patched:
        for kind in (Outer, Conv, Embedding):
            patched.setattr(kind, "materialize", None)
        found = getattr(factor, operation)(*signs)
    assert_trees_close(found, total.view(4, *[1] * (found.ndim - 1)).expand_as(found), 1e-12)


@pytest.mark.parametrize("shape", [(5,), (5, 1), (1, 5), (1,), ()], ids=str)
def test_all_entries_of_a_vector_are_projections_of_it(shape):
    size, rank = torch.Size(shape).numel(), 4
    basis, x = torch.eye(size).double().view(size, *shape), draw(3, *shape)
    signs, found = (
        per_sample_grads(lambda w, x: (w * x).sum(), draw(*shape), batch, ps.Sketch(rank, 0)) for batch in (basis, x)
    )
    assert_trees_close(signs.abs() * rank, torch.ones(size, rank**2).double(), 1e-12)
    assert len((signs * signs[0].sign()).unique(dim=1).T) > min(size - 1, rank)  # not those of few pairs
    assert_trees_close(found, x.view(3, size) @ signs, 1e-12)


def test_a_seed_draws_the_same_signs_everywhere():
    """Sketches of one seed are compared across runs and versions: the first signs are written down here."""
    found = per_sample_grads(lambda w, x: (w * x).sum(), torch.zeros(2, 2), torch.eye(4).view(4, 2, 2), ps.Sketch(2, 0))
    assert (found * 2).int().tolist() == [[-1, 1, 1, -1], [1, 1, -1, -1], [1, -1, 1, -1], [-1, -1, -1, -1]]


@pytest.mark.parametrize("name", ["Sketch", "Sketch-total"])
@pytest.mark.parametrize("engine", ["eager", "traced", "loop"])
def test_streams(engine, name):
    work = build("mlp_td")
    rows = oracle(work.loss_fn, work.params, work.batch)
    make, expected = REDUCTIONS[name]
    batches = [tuple(x[index] for x in work.batch) for index in (slice(2), slice(2, None))]
    found = accumulate(work.loss_fn, work.params, batches, make(rows, torch.float64), engine=engine)
    assert_trees_close(found, expected(rows), 1e-9)


@pytest.mark.parametrize("number", [0, -1, True, 2.0, None])
def test_no_rank(number):
    with pytest.raises(ArgumentError, match="rank: expected a positive int, received"):
        ps.Sketch(number, seed=0)
    with pytest.raises(ArgumentError, match="dim: expected a positive int, received"):
        ps.Project(number, seed=0)
