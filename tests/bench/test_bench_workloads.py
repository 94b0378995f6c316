"""The benchmark's workloads, quantities and methods: each checked against plain autograd before anything is timed."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from compiler import lowered

from benchmarks import saved, spellings
from benchmarks.cells import MEASURED
from benchmarks.methods import FILES, load
from benchmarks.oracle import oracle, write
from benchmarks.quantities import CHECKED_NUMBERS, QUANTITIES, agrees, checked_rows
from benchmarks.report.records import UNIT
from benchmarks.targets import JAX, TARGETS
from benchmarks.workloads import WORKLOADS, build
from persample import ClippedMean, clear_cache, per_sample_grads

LARGE = {"tutorial TD(0), B=65536", "transformer tied 32000, B=16", "wide MLP 5120, B=32"}
SMALL = "TD(0) MLP 16, B=5"
EAGER = [method for method in load("torch").values() if "compiled" not in method.name and not method.is_limit]


@pytest.fixture(scope="module")
def truths():
    found = {}

    def truth(workload, quantity):
        if (workload, quantity) not in found:
            found[workload, quantity] = oracle(build(workload).to(torch.float64), quantity)
        return found[workload, quantity]

    return truth


@pytest.mark.parametrize("name", sorted(WORKLOADS.keys() - LARGE))
def test_the_batch_loss_is_the_mean_of_the_losses(name):
    work = build(name)
    samples = list(zip(*work.batch, strict=True))
    with torch.no_grad():
        losses = [work.loss_fn(work.model, *sample) for sample in samples]
        torch.testing.assert_close(work.batch_loss(work.model, *work.batch), torch.stack(losses).mean())
        torch.testing.assert_close(work.pure_loss(work.params, *samples[-1]), losses[-1])


@pytest.mark.parametrize("name", ["REINFORCE MLP 64, 32x200", "DQN Nature CNN, B=32", "LoRA transformer, B=16"])
def test_a_workload_is_seeded_and_survives_its_file(name, tmp_path):
    work = build(name)
    work.save(tmp_path / "work.npz")
    torch.randn(3)  # whatever was drawn before
    again, read = build(name).saved(), saved.load(tmp_path / "work.npz")
    assert saved.equal(again, read)
    assert (read.name, read.kind, read.sizes) == (work.name, work.kind, work.sizes)
    assert read.frozen.keys() == work.frozen.keys()
    again.params[next(iter(again.params))].flat[-1] += 1
    assert not saved.equal(again, read)


def test_what_is_frozen_is_apart():
    dqn, lora = build("DQN Nature CNN, B=32"), build("LoRA transformer, B=16")
    assert dqn.frozen.keys() == dqn.params.keys()
    assert not torch.equal(dqn.frozen["0.weight"], dqn.params["0.weight"])
    assert all(name.endswith(("down.weight", "up.weight")) for name in lora.params)
    assert "embed.weight" in lora.frozen


@pytest.mark.parametrize("name", ["REINFORCE MLP 64, 32x200", "GRU policy, 32x50"])
def test_episodes_are_padded_rollouts(name):
    obs_t, a_t, _, mask_t = build(name).batch
    lengths = mask_t.sum(1)
    assert mask_t.shape == (32, int(name.rpartition("x")[2]))
    assert lengths.min() < lengths.max() == mask_t.shape[1]
    assert not obs_t[~mask_t].any()
    assert a_t[mask_t].float().mean().item() == pytest.approx(0.5, abs=0.2)


def test_a_dtype_moves_what_is_floating_and_the_target_network():
    work = build("DQN Nature CNN, B=32").to(torch.float64)
    assert {p.dtype for p in (*work.params.values(), *work.frozen.values())} == {torch.float64}
    assert [x.dtype for x in work.batch] == [torch.float64, torch.int64, torch.float64, torch.float64]


def test_the_oracle_is_the_formula():
    work = build("tutorial TD(0), B=2").to(torch.float64)
    (s_tm1, r_t, s_t), theta = work.batch, work.params["theta"]
    grads = (-2 * (r_t + s_t @ theta - s_tm1 @ theta)[:, None] * s_tm1).numpy()
    norms = np.linalg.norm(grads, axis=1)
    expected = {
        "stack": grads,
        "mean": grads.mean(0),
        "norms": norms,
        "clipped_mean": (grads * np.minimum(1, 1 / norms)[:, None]).mean(0),
        "gram": grads @ grads.T,
        "variance": ((grads - grads.mean(0)) ** 2).sum(0),
    }
    for quantity, value in expected.items():
        found = oracle(work, quantity)
        np.testing.assert_allclose(found["theta"] if isinstance(found, dict) else found, value, rtol=1e-12)


ROWS = [(quantity, method) for quantity in QUANTITIES for method in EAGER if quantity in method.shown_for]


CELLS = [(workload, *row) for workload in (SMALL, "tutorial TD(0), B=2") for row in ROWS]
CELLS += [("REINFORCE MLP 64, 32x200", *row) for row in ROWS if row[0] == "clipped_mean"]


@pytest.mark.parametrize(("workload", "quantity", "method"), CELLS, ids=lambda x: getattr(x, "name", x))
def test_methods_agree_with_the_oracle(workload, quantity, method, truths):
    if method.name == "ExpandedWeights" and workload.startswith("tutorial"):
        with pytest.raises(RuntimeError, match="cannot handle function matmul"):
            method.prepare(build(workload), quantity).run()
        return
    prepared = method.prepare(build(workload), quantity)
    prepared.run()
    error, wrong = agrees(prepared.numpy(prepared.run()), truths(workload, quantity), quantity)
    assert wrong is None
    assert error < 1e-4


@pytest.mark.parametrize("method", ["torch.func", "persample eager"])
@pytest.mark.parametrize("workload", ["GRU policy, 32x50", "DQN Nature CNN, B=32", "LoRA transformer, B=16"])
def test_methods_on_larger_workloads(workload, method, truths):
    prepared = load("torch")[method].prepare(build(workload), "clipped_mean")
    if (workload, method) == ("GRU policy, 32x50", "torch.func"):
        with pytest.raises(RuntimeError, match="broadcast"):
            prepared.run()
        return
    assert agrees(prepared.numpy(prepared.run()), truths(workload, "clipped_mean"), "clipped_mean")[1] is None


@pytest.mark.parametrize("name", ["fill_", "batch gradient's GEMMs"])
def test_limits_run(name):
    method = load("torch")[name]
    prepared = method.prepare(build(SMALL), method.shown_for[0])
    result = prepared.run()
    if name == "fill_":
        assert {key: rows.shape for key, rows in prepared.numpy(result).items()}["2.weight"] == (5, 16, 16)
        assert all((rows == 1).all() for rows in result.values())


TRUTH = {"w": np.array([[1.0, -2.0], [3.0, 4.0]]), "b": np.array([0.0, 1e-9])}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"w": TRUTH["w"] * 1.01}, r"differs from the loop in float64 by 0\.01"),
        ({"w": np.full((2, 2), np.nan)}, "differs from the loop in float64 by nan"),
        ({"w": TRUTH["w"][:1]}, r"has the shape \[1, 2\] for 'w', not \[2, 2\]"),
        ({"extra": np.zeros(1)}, r"has the parameters \['b', 'extra', 'w'\], not \['b', 'w'\]"),
        ({"b": np.array([0.0, 1e-2])}, "differs"),
        ({"b": np.array([0.0, 1e-8])}, None),  # nothing against the largest value of all
        ({"w": TRUTH["w"] * 1.001}, None),
    ],
)
def test_what_agrees(change, reason):
    error, wrong = agrees({**TRUTH, **change}, TRUTH, "mean")
    assert (wrong is None) == (reason is None)
    if reason is not None:
        assert re.search(reason, wrong)
        assert not error <= 5e-3


def test_large_stacks_are_checked_in_rows():
    assert checked_rows(4, 10) == [0, 1, 2, 3]
    assert checked_rows(101, CHECKED_NUMBERS // 5) == [0, 25, 50, 75, 100]
    assert checked_rows(7, 2 * CHECKED_NUMBERS) == [0, 6]
    assert checked_rows(1, 2 * CHECKED_NUMBERS) == [0]


def test_a_wrong_row_of_a_stack_is_found():
    truth = np.arange(12.0).reshape(4, 3)
    wrong = truth.copy()
    wrong[2] = 0
    assert agrees({"w": truth}, {"w": truth}, "stack") == (0.0, None)
    assert agrees({"w": wrong}, {"w": truth}, "stack")[1] is not None


def test_truth_goes_through_files(tmp_path):
    write(SMALL, tmp_path, ["norms", "mean"])
    work = build(SMALL).to(torch.float64)
    np.testing.assert_array_equal(saved.load_truth(tmp_path / "norms.npz"), oracle(work, "norms"))
    assert saved.load_truth(tmp_path / "mean.npz").keys() == work.params.keys()
    assert saved.equal(saved.load(tmp_path / "workload.npz"), build(SMALL).saved())


def test_every_workload_and_target_is_measured():
    assert list(MEASURED) == list(WORKLOADS)
    assert {quantity for quantities in MEASURED.values() for quantity in quantities} == set(QUANTITIES)
    names = {*load("torch"), JAX}
    for target in TARGETS:
        assert target.quantity in MEASURED[target.workload]
        assert target.relative_quantity in {None, *MEASURED[target.workload]}
        assert {target.method, target.relative_to or UNIT} <= names
    assert FILES["torch"][0] == "unit"


def test_convolutions_in_all_spellings_are_one_program(monkeypatch):
    nets, loss, batch = spellings.programs()["CNN, B=32"]
    graphs = lowered(monkeypatch)
    for params, net in nets.values():
        clear_cache()
        one = lambda params, *sample, net=net: loss(net, params, *sample)
        per_sample_grads(one, params, batch, ClippedMean(1.0), engine="compiled")
    codes = {graph.code for graph in graphs}
    assert (len(graphs), len(codes)) == (5, 1)
