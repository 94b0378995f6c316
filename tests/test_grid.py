"""Promise 1: every reduction × engine × model × dtype equals the plain loop."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracle import Rows, assert_trees_close, oracle, reals
from workloads import WORKLOADS, build

import persample as ps
from persample import per_sample_grads

ENGINES = {
    "eager": {"engine": "eager"},
    "eager-chunks": {"engine": "eager", "chunk_size": 2},
    "loop": {"engine": "loop"},
    "loop-chunks": {"engine": "loop", "chunk_size": 3},
}
RTOL = {torch.float64: 1e-9, torch.float32: 1e-4}
BOUND = 0.5


def norms(rows: Rows):
    return reals(rows).norm(dim=1)


def scaled_sum(rows: Rows, scale):
    return rows.tree([torch.stack([s * g for s, g in zip(scale, grad, strict=True)]).sum(0) for grad in rows.grads])


def scaled_mean(rows: Rows, scale):
    return scaled_sum(rows, scale / len(scale))


def clip(rows: Rows):
    return torch.tensor([min(1.0, BOUND / n) if n else 1.0 for n in norms(rows).tolist()], dtype=torch.float64)


def clip_each(rows: Rows, divisor):
    own = [clip(Rows([grad], rows.losses, rows.structure)) for grad in rows.grads]
    return rows.tree(
        [
            torch.stack([s * g for s, g in zip(scale, grad, strict=True)]).sum(0) / divisor
            for scale, grad in zip(own, rows.grads, strict=True)
        ]
    )


def elementwise(rows: Rows, fn):
    def one(grad):
        return torch.view_as_complex(fn(torch.view_as_real(grad))) if grad.is_complex() else fn(grad)

    return rows.tree([one(grad) for grad in rows.grads])


def directions(rows: Rows, count):
    generator = torch.Generator().manual_seed(count)
    return rows.tree([torch.randn(count, *g.shape[1:], dtype=g.dtype, generator=generator) for g in rows.grads])


def dots(rows: Rows, count):
    leaves = torch.utils._pytree.tree_leaves(directions(rows, count))
    return reals(rows) @ reals(Rows(leaves, rows.losses, rows.structure)).T


def cosines(rows: Rows):
    unit = torch.stack([g / g.norm() if g.norm() else g for g in reals(rows)])
    return unit @ unit.T


def noise_scale(rows: Rows):
    g = reals(rows)
    trace = g.var(dim=0).sum()
    squared = g.mean(0).square().sum() - trace / len(g)
    return ps.reductions.NoiseScaleEstimate(trace, squared, trace / squared)


def projections(rows: Rows):
    reduction, total = ps.Project(6, seed=1), 0
    for path, grad in zip(ps.utils.trees.paths(rows.tree(rows.grads), "params"), rows.grads, strict=True):
        g = torch.view_as_real(grad) if grad.is_complex() else grad
        g = g.reshape(len(g), grad.shape[1] if grad.ndim > 1 else 1, -1)
        left, right = reduction._signs(path, *g.shape[1:])
        total = total + torch.stack([((u[:, None] * v) * g).sum((1, 2)) for u, v in zip(left, right, strict=True)], 1)
    return total / 6**0.5


def cast(tree, dtype):
    return torch.utils._pytree.tree_map(lambda x: x.to(dtype.to_complex() if x.is_complex() else dtype), tree)


ones = torch.ones_like
# name: (from (rows, dtype) to the reduction, from rows to what the definition gives)
REDUCTIONS = {
    "none": (lambda r, d: None, lambda r: r.tree(r.grads)),
    "Stack": (lambda r, d: ps.Stack(), lambda r: r.tree(r.grads)),
    "Sum": (lambda r, d: ps.Sum(), lambda r: scaled_sum(r, ones(r.losses))),
    "Mean": (lambda r, d: ps.Mean(), lambda r: scaled_mean(r, ones(r.losses))),
    "Norm": (lambda r, d: ps.Norm(), norms),
    "Norm-per_param": (
        lambda r, d: ps.Norm(per_param=True),
        lambda r: r.tree([norms(Rows([g], r.losses, r.structure)) for g in r.grads]),
    ),
    "ClippedSum": (lambda r, d: ps.ClippedSum(BOUND), lambda r: scaled_sum(r, clip(r))),
    "ClippedSum-per_param": (lambda r, d: ps.ClippedSum(BOUND, per_param=True), lambda r: clip_each(r, 1)),
    "ClippedMean": (lambda r, d: ps.ClippedMean(BOUND), lambda r: scaled_mean(r, clip(r))),
    "ClippedMean-per_param": (
        lambda r, d: ps.ClippedMean(BOUND, per_param=True),
        lambda r: clip_each(r, len(r.losses)),
    ),
    "WeightedSum": (
        lambda r, d: ps.WeightedSum(lambda norm: torch.exp(-norm)),
        lambda r: scaled_sum(r, torch.exp(-norms(r))),
    ),
    "Gram": (lambda r, d: ps.Gram(), lambda r: reals(r) @ reals(r).T),
    "CosineSimilarity": (lambda r, d: ps.CosineSimilarity(), cosines),
    "Dot": (
        lambda r, d: ps.Dot(torch.utils._pytree.tree_map(lambda x: x[0], cast(directions(r, 1), d))),
        lambda r: dots(r, 1).squeeze(1),
    ),
    "Dot-stacked": (lambda r, d: ps.Dot(cast(directions(r, 3), d), stacked=True), lambda r: dots(r, 3)),
    "SecondMoment": (lambda r, d: ps.SecondMoment(), lambda r: elementwise(r, lambda g: g.square().mean(0))),
    "Variance": (lambda r, d: ps.Variance(), lambda r: elementwise(r, lambda g: g.var(dim=0))),
    "Variance-plain": (
        lambda r, d: ps.Variance(correction=0),
        lambda r: elementwise(r, lambda g: g.var(dim=0, correction=0)),
    ),
    "NoiseScale": (lambda r, d: ps.NoiseScale(), noise_scale),
    "Project": (lambda r, d: ps.Project(6, seed=1), projections),
    "Loss": (lambda r, d: ps.Loss(), lambda r: r.losses),
}


@pytest.mark.parametrize("dtype", RTOL, ids=["float64", "float32"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("workload", WORKLOADS)
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
