"""Promise 1: every reduction × engine × model × dtype equals the plain loop, in pairs."""

from __future__ import annotations

import itertools

import pytest
import torch
from grid import ENGINES, REDUCTIONS, RTOL
from oracle import Rows, assert_trees_close, oracle
from workloads import WORKLOADS, build

import persample as ps
from persample import per_sample_grads

# Variants of others here, which the test of one pass covers.
TOGETHER = {
    *("CosineSimilarity-other", "NaturalGradient", "NaturalGradient-centered", "FisherVectorProduct"),
    *("ClippedSum-by-name", "Variance-total", "Sketch-total"),
}


def cells():
    """Every model with every reduction on the eager engine, with every other engine and dtype once each.

    The loop engine and the dtype know nothing of how models store their gradients, nor chunks of what is merged.
    ``tests/public/test_mutations.py`` holds faults that the product found, and that these cells find.
    """
    reductions = [name for name in REDUCTIONS if name not in TOGETHER]
    eager, loop, dtypes = ("eager", "eager-chunks"), ("loop", "loop-chunks"), list(RTOL)
    for j, reduction in enumerate(reductions):
        for i, workload in enumerate(WORKLOADS):
            yield workload, reduction, eager[(i + j) % 2], dtypes[(i + j // 2) % 2]
        for k, engine in enumerate(loop):
            yield [*WORKLOADS][(j + k) % len(WORKLOADS)], reduction, engine, dtypes[(j // len(WORKLOADS) + k) % 2]


@pytest.mark.parametrize(("workload", "reduction", "engine", "dtype"), [*cells()])
def test_equals_the_loop(workload, reduction, engine, dtype):
    work = build(workload, dtype)
    rows = oracle(work.loss_fn, work.params, work.batch)
    make, expected = REDUCTIONS[reduction]
    actual = per_sample_grads(work.loss_fn, work.params, work.batch, make(rows, dtype), **ENGINES[engine])
    assert_trees_close(actual, expected(rows), RTOL[dtype])
    if reduction in {"Mean", "Stack"}:  # results have the dtypes of their parameters
        leaves = torch.utils._pytree.tree_leaves(actual)
        assert {leaf.dtype for leaf in leaves} <= {dtype, dtype.to_complex()}
        assert not any(leaf.requires_grad for leaf in leaves)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_all_reductions_from_one_pass(workload, engine):
    work = build(workload)
    rows = oracle(work.loss_fn, work.params, work.batch)
    calls = []

    def counted(*args):
        calls.append(1)
        return work.loss_fn(*args)

    wanted = {name: make(rows, torch.float64) for name, (make, _) in REDUCTIONS.items()}
    results = per_sample_grads(counted, work.params, work.batch, wanted, **ENGINES[engine])
    for name, (_, expected) in REDUCTIONS.items():
        assert_trees_close(results[name], expected(rows), 1e-9)
    passes = {"eager": 1, "eager-chunks": -(-len(rows.losses) // 2)}
    assert len(calls) == passes.get(engine, len(rows.losses))


def of_units(rows, ids, reduce):
    """Sum or average the rows of each unit, by hand."""
    units = [torch.tensor([i for i, other in enumerate(ids) if other == unit]) for unit in dict.fromkeys(ids)]
    added = [[getattr(x[index], reduce)(0) for index in units] for x in (*rows.grads, rows.losses)]
    *grads, losses = map(torch.stack, added)
    return Rows(grads, losses, rows.structure)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("engine", [*ENGINES, "traced"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_all_reductions_of_units(workload, engine, reduce):
    work = build(workload)
    rows = oracle(work.loss_fn, work.params, work.batch)
    size = len(rows.losses)
    ids = [3, 1, 3, 0, 1, 1, 0, 3, 8, 0][:size] if reduce == "sum" else [i % 3 for i in range(size)]
    rows = of_units(rows, ids, reduce)
    wanted = {name: make(rows, torch.float64) for name, (make, _) in REDUCTIONS.items()}
    options = {"unit": ids, "unit_reduce": reduce, **ENGINES.get(engine, {"engine": engine})}
    results = per_sample_grads(work.loss_fn, work.params, work.batch, wanted, **options)
    for name, (_, expected) in REDUCTIONS.items():
        assert_trees_close(results[name], expected(rows), 1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_factored_materializes_to_the_gradients(engine):
    work = build("mlp_td")
    rows = oracle(work.loss_fn, work.params, work.batch)
    factors = per_sample_grads(work.loss_fn, work.params, work.batch, ps.Factored(), **ENGINES[engine])
    for (name, factor), grads in zip(factors.items(), rows.grads, strict=True):
        assert name in work.params
        assert_trees_close(factor.materialize(), grads, 1e-9)
        for order in itertools.permutations(range(grads.ndim)):  # in which the axes lie in memory
            out = torch.empty([grads.shape[axis] for axis in order], dtype=grads.dtype)
            out = out.permute([order.index(axis) for axis in range(grads.ndim)])
            assert factor.materialize(out=out) is out
            assert_trees_close(out, grads, 1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_aux_is_stacked(engine):
    work = build("tutorial_td")

    def loss(theta, s_tm1, r_t, s_t):
        return work.loss_fn(theta, s_tm1, r_t, s_t), {"v": s_tm1 @ theta, "seen": (s_t,)}

    aux, mean = per_sample_grads(loss, work.params, work.batch, (ps.Aux(), ps.Mean()), **ENGINES[engine])
    s_tm1, _, s_t = work.batch
    assert_trees_close(aux, {"v": s_tm1 @ work.params, "seen": (s_t,)}, 1e-12)
    rows = oracle(work.loss_fn, work.params, work.batch)
    assert_trees_close(mean, rows.grads[0].mean(0), 1e-9)


def test_every_pair_is_a_cell():
    pairs = {(i, j, cell[i], cell[j]) for cell in cells() for i, j in itertools.combinations(range(4), 2)}
    values = [{cell[i] for cell in cells()} for i in range(4)]
    assert list(map(len, values)) == [len(WORKLOADS), len(REDUCTIONS) - len(TOGETHER), len(ENGINES), len(RTOL)]
    for i, j in itertools.combinations(range(4), 2):
        assert not [pair for pair in itertools.product(values[i], values[j]) if (i, j, *pair) not in pairs]


def test_the_assertion_can_fail():
    x = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    wrong = [
        {"w": x["w"] + 1e-8},
        {"w": x["w"] * torch.nan},
        {"w": x["w"][:1]},
        {"v": x["w"]},
        [x["w"]],
    ]
    assert_trees_close(x, x, 1e-9)
    for other in wrong:
        with pytest.raises(AssertionError):
            assert_trees_close(other, x, 1e-9)
