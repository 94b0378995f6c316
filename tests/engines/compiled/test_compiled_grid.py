"""The compiled engine over the oracle grid: several reductions of a model in one program.

What Inductor is given is the traced graph, functional and decomposed: each reduction once, each model once.
"""

from __future__ import annotations

import pytest
import torch
from compiler import without_compiling
from grid import REDUCTIONS, RTOL, part
from oracle import Rows, assert_trees_close, oracle
from workloads import WORKLOADS, build

import persample as ps
from persample import per_sample_grads

NAN = float("nan")


def wanted_of(rows, dtype, names=REDUCTIONS):
    return {name: REDUCTIONS[name][0](rows, dtype) for name in names}


def assert_close(results, rows, rtol):
    for name, result in results.items():
        assert_trees_close(result, REDUCTIONS[name][1](rows), rtol)


# What Inductor compiles in seconds, with all reductions; the other models are compiled in the slow tests.
QUICK = {"tutorial_td"}
# Traced elsewhere: loops in test_compiled_recurrent.py, episodes in chunks below, nested trees in test_traced.py.
ELSEWHERE = {"gru_cell_loop", "reinforce_episodes", "nested_params"}
COMPILED = [pytest.param(name, True, marks=[] if name in QUICK else pytest.mark.slow) for name in WORKLOADS]
TRACED = [pytest.param(name, False) for name in WORKLOADS if name not in QUICK | ELSEWHERE]


@pytest.mark.parametrize(("workload", "inductor"), [*COMPILED, *TRACED])
def test_equals_the_loop(workload, inductor, monkeypatch):
    if not inductor:
        without_compiling(monkeypatch)
    work = build(workload)
    rows = oracle(work.loss_fn, work.params, work.batch)
    wanted = wanted_of(rows, torch.float64, REDUCTIONS if inductor else part(workload, 6))
    for _ in range(2):  # the second time the call is recalled
        results = per_sample_grads(work.loss_fn, work.params, work.batch, wanted, engine="compiled")
        assert results.keys() == wanted.keys()
        assert_close(results, rows, 1e-9)
        leaves = [x for x in torch.utils._pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]
        assert not any(leaf.requires_grad for leaf in leaves)
        for leaf in leaves:
            leaf.fill_(NAN)  # results own their memory: the next one must not see it


@pytest.mark.parametrize("workload", ["tutorial_td", pytest.param("embedding_attention", marks=pytest.mark.slow)])
def test_equals_the_loop_in_float32(workload):
    work = build(workload, torch.float32)
    rows = oracle(work.loss_fn, work.params, work.batch)
    wanted = wanted_of(rows, torch.float32, part(workload, 6))
    results = per_sample_grads(work.loss_fn, work.params, work.batch, wanted, engine="compiled")
    assert_close(results, rows, RTOL[torch.float32])
    assert {leaf.dtype for leaf in torch.utils._pytree.tree_leaves(results)} == {torch.float32}


@pytest.mark.parametrize(
    ("workload", "chunk_size", "inductor"),
    [
        ("tutorial_td", 2, False),
        ("reinforce_episodes", 3, False),
        pytest.param("tutorial_td", 2, True, marks=pytest.mark.slow),
    ],
)
def test_chunks_equal_the_loop(workload, chunk_size, inductor, monkeypatch):
    if not inductor:
        without_compiling(monkeypatch)
    work = build(workload)
    rows = oracle(work.loss_fn, work.params, work.batch)
    wanted = wanted_of(rows, torch.float64, part(workload, 6))
    results = per_sample_grads(work.loss_fn, work.params, work.batch, wanted, engine="compiled", chunk_size=chunk_size)
    assert_close(results, rows, 1e-9)


OVER_SAMPLES = {
    "Sum": ps.Sum(),
    "Mean": ps.Mean(),
    "ClippedMean": ps.ClippedMean(0.5),
    "SecondMoment": ps.SecondMoment(),
    "Variance": ps.Variance(),
    "Variance-total": ps.Variance(total=True),
    "NoiseScale": ps.NoiseScale(),
}
PER_SAMPLE = {"Norm": ps.Norm(), "Gram": ps.Gram(), "Loss": ps.Loss()}


@pytest.mark.parametrize(
    ("workload", "inductor"),
    [("tutorial_td", True), ("mlp_td", False), pytest.param("mlp_td", True, marks=pytest.mark.slow)],
)
def test_weights_count_samples_and_remove_nan(workload, inductor, monkeypatch):
    if not inductor:
        without_compiling(monkeypatch)
    work = build(workload)
    rows = oracle(work.loss_fn, work.params, work.batch)
    kept = torch.tensor([0, 2, 2, 3])  # what the weights 1, 0, 2, 1, 0 mean
    repeated = Rows([g[kept] for g in rows.grads], rows.losses[kept], rows.structure)
    batch = [x.clone() for x in work.batch]
    batch[0][1] = NAN
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0])
    results = per_sample_grads(
        work.loss_fn, work.params, tuple(batch), {**OVER_SAMPLES, **PER_SAMPLE}, weights=weights, engine="compiled"
    )
    for name in OVER_SAMPLES:
        assert_trees_close(results[name], REDUCTIONS[name][1](repeated), 1e-9)
    seen = torch.tensor([0, 2, 3, 4])
    for name in ("Norm", "Loss"):
        assert_trees_close(results[name][seen], REDUCTIONS[name][1](rows)[seen], 1e-9)
        assert results[name][1].isnan()
    assert_trees_close(results["Gram"][seen][:, seen], REDUCTIONS["Gram"][1](rows)[seen][:, seen], 1e-9)


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_sample(inductor, monkeypatch):
    if not inductor:
        without_compiling(monkeypatch)
    work = build("mlp_td")
    batch = tuple(x[:1] for x in work.batch)
    rows = oracle(work.loss_fn, work.params, batch)
    names = {*(REDUCTIONS if inductor else part("mlp_td", 6))} - {
        "Variance",
        "Variance-plain",
        "Variance-total",
        "NoiseScale",
    }
    results = per_sample_grads(
        work.loss_fn, work.params, batch, wanted_of(rows, torch.float64, sorted(names)), engine="compiled"
    )
    assert_close(results, rows, 1e-9)
    # Of one sample it is 0, but for the rounding of a difference.
    for x in torch.utils._pytree.tree_leaves(
        per_sample_grads(work.loss_fn, work.params, batch, ps.Variance(correction=0), engine="compiled")
    ):
        assert x.abs().max() < 1e-14
    with pytest.raises(ps.ArgumentError, match=r"Variance\(\): expected samples .* more than 1, received B = 1"):
        per_sample_grads(work.loss_fn, work.params, batch, ps.Variance(), engine="compiled")


def test_no_samples():
    work = build("mlp_td")
    batch = tuple(x[:0] for x in work.batch)
    wanted = {"Stack": ps.Stack(), "Sum": ps.Sum(), "Norm": ps.Norm(), "Gram": ps.Gram()}
    results = per_sample_grads(work.loss_fn, work.params, batch, wanted, engine="compiled")
    for name, param in work.params.items():
        assert results["Stack"][name].shape == (0, *param.shape)
        assert torch.equal(results["Sum"][name], torch.zeros_like(param))
    assert results["Norm"].shape == (0,)
    assert results["Gram"].shape == (0, 0)
    with pytest.raises(ps.ArgumentError, match="B = 0"):
        per_sample_grads(work.loss_fn, work.params, batch, ps.Mean(), engine="compiled")


def test_a_batch_axis_is_kept_and_found_elsewhere():
    w, s, other = (torch.randn(*shape, dtype=torch.float64) for shape in ((3,), (5, 3), (3, 5)))

    def loss(w, s, other):
        assert s.shape == (1, 3)
        assert other.shape == (1, 3)
        return ((s @ w) ** 2 * (other @ w)).squeeze(0)

    options = {"in_dims": (None, (0, 1)), "keep_batch_dim": True}
    actual = per_sample_grads(loss, w, (s, other), (ps.Stack(), ps.Mean()), engine="compiled", **options)
    rows = oracle(lambda w, s, o: (s @ w) ** 2 * (o @ w), w, (s, other.T))
    assert_trees_close(actual, (rows.grads[0], rows.grads[0].mean(0)), 1e-9)


def test_every_sample_has_its_own_parameters():
    params = {"w": torch.randn(4, 2, 3, dtype=torch.float64), "b": torch.randn(4, 2, dtype=torch.float64)}
    x = torch.randn(4, 3, dtype=torch.float64)

    def loss(p, x):
        return torch.tanh(p["w"] @ x + p["b"]).square().sum()

    wanted = (ps.Stack(), ps.ClippedMean(0.1), ps.Norm())
    actual = per_sample_grads(loss, params, x, wanted, in_dims=(0, 0), engine="compiled")
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    total = sum(loss({name: p[i] for name, p in leaves.items()}, x[i]) for i in range(4))
    stack = dict(zip(leaves, torch.autograd.grad(total, leaves.values()), strict=True))
    norms = torch.cat([stack["w"].flatten(1), stack["b"]], 1).norm(dim=1)
    clip = (0.1 / norms).clamp_max(1)
    mean = {name: torch.einsum("b,b...->...", clip, g) / 4 for name, g in stack.items()}
    assert_trees_close(actual, (stack, mean, norms), 1e-9)


def test_aux_and_factors():
    work = build("mlp_td")
    rows = oracle(work.loss_fn, work.params, work.batch)

    def loss(params, s_tm1, r_t, s_t):
        return work.loss_fn(params, s_tm1, r_t, s_t), {"r": 2 * r_t, "seen": (s_t,)}

    aux, factors = per_sample_grads(loss, work.params, work.batch, (ps.Aux(), ps.Factored()), engine="compiled")
    assert_trees_close(aux, {"r": 2 * work.batch[1], "seen": (work.batch[2],)}, 1e-12)
    aux["seen"][0].zero_()
    assert work.batch[2].any()  # the caller's own tensor is not what was returned
    for factor, grads in zip(factors.values(), rows.grads, strict=True):
        assert_trees_close(factor.materialize(), grads, 1e-9)
