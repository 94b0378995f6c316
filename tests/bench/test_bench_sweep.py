"""The sweep: what is drawn, how its ratios are summarized, and a smoke run."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter

import pytest
from bench_run import record

from benchmarks.cells import SWEEPING, Cell, Listed, swept
from benchmarks.methods import load
from benchmarks.pages import sweep_part
from benchmarks.process import ROOT
from benchmarks.report.files import read
from benchmarks.report.records import Record, Results
from benchmarks.report.sweep import distribution, every_workload, goals
from benchmarks.sweep import draws
from benchmarks.sweep.draws import DRAWS, KINDS, RANGES
from benchmarks.workers import Workers
from benchmarks.workloads import build

EAGER, COMPILED = "persample eager", "persample compiled"


# What is drawn.


def test_the_draws_are_seeded_and_within_their_ranges():
    assert {draw.name: draw for draw in draws.draws()} == DRAWS
    assert list(draws.draws(3, seed=1)) != list(DRAWS.values())[:3]
    assert len(DRAWS) == draws.COUNT
    assert set(Counter(draw.kind for draw in DRAWS.values()).values()) == {draws.COUNT // len(KINDS)}
    for draw in DRAWS.values():
        assert all(low <= getattr(draw, name) <= high for name, (low, high) in RANGES.items()), draw
        assert draw.work <= 1.2 * draws.LARGEST_WORK  # the width is rounded after the work is limited
        assert draw.width % 8 == 0
        assert draw.kind != "CNN" or math.isqrt(draw.steps) ** 2 == draw.steps >= 16
        assert draw.kind not in draws.RECURRENT or draw.steps * draw.layers <= draws.MOST_UNROLLED
    assert {draw.steps == 1 for draw in DRAWS.values() if draw.kind == "MLP"} == {True, False}


@pytest.mark.parametrize("name", draws.QUICK)
def test_a_drawn_workload_has_the_sizes_of_its_name(name):
    work, draw = build(name), DRAWS[name]
    assert work.name == name
    assert (len(work.batch[0]), work.batch[0].shape[-1]) == (draw.batch_size, draw.width)
    assert len([p for p in work.params.values() if p.ndim == 2]) == 1 + draw.layers * KINDS[draw.kind]


def test_the_sweep_compares_ours_with_the_libraries_that_users_choose_between():
    listed = [Listed(name, "torch", ()) for name in (*SWEEPING, "naive loop")]
    found = swept(listed)
    assert [cell.key for cell in found] == [(name, "clipped_mean", method) for name in DRAWS for method in SWEEPING]
    assert {cell.workload for cell in swept(listed, quick=True)} == set(draws.QUICK)
    assert {cell.method.name for cell in swept(listed, only=["BackPACK"])} == {"BackPACK"}
    assert set(SWEEPING) >= {
        name for name in load("torch") if name in {EAGER, "persample traced", COMPILED, "torch.func"}
    }


# The table.


def of(workload, method, ratio, unit_s=0.01):
    if ratio is None:
        return Record(workload, "clipped_mean", method, "cannot", "no")
    return Record(workload, "clipped_mean", method, "ok", median_s=ratio * unit_s, unit_s=unit_s, ratio=ratio)


def sweep(eager, compiled, peer):
    """Workloads w0, w1, …, of which the first has a short batch gradient."""
    rows = enumerate(zip(eager, compiled, peer, strict=True))
    found = [
        of(f"w{i}", method, ratio, unit_s=0.001 if i == 0 else 0.01)
        for i, ratios in rows
        for method, ratio in zip((EAGER, COMPILED, "Opacus hooks"), ratios, strict=True)
    ]
    return Results({"cpu": "a CPU"}, tuple(found))


RUN = sweep([9.0, 1.0, 2.0, 1.5], [0.5, 0.8, 1.3, 0.7], [2.0, 1.02, None, 0.72])


def test_the_distribution_is_over_all_workloads_and_over_the_long_ones():
    assert distribution(RUN).rows == [
        [EAGER, "all", "4", "1.75", "9.00", "9.00", "25%"],  # w2: no peer can; w1: within 5 %
        [EAGER, "those over 5.00 ms", "3", "1.50", "2.00", "2.00", "33%"],
        [COMPILED, "all", "4", "0.75", "1.30", "1.30", "75%"],
        [COMPILED, "those over 5.00 ms", "3", "0.80", "1.30", "1.30", "67%"],
    ]


def test_a_workload_that_we_cannot_do_counts_as_the_worst():
    failed = sweep([1.0, None, 1.2], [0.5, 0.5, 0.5], [2.0, 2.0, 2.0])
    assert distribution(failed).rows[0] == [EAGER, "all", "3", "1.20", "–", "–", "67%"]
    assert goals(failed).rows[1] == ["persample eager, worst of those over 5.00 ms: ≤ 3", "–", "no"]
    assert every_workload(failed).rows[1] == ["w1", "10.0 ms", "cannot", "0.50", "Opacus hooks: 2.00"]


def test_goals_say_which_hold():
    assert goals(RUN).rows[0] == ["persample eager, median of those over 5.00 ms: ≤ 1.6", "1.50", "yes"]
    assert [row[1:] for row in goals(RUN).rows[1:]] == [
        ["2.00", "yes"],
        ["0.75", "yes"],
        ["1.30", "no"],
        ["75%", "no"],
    ]
    assert goals(Results(records=(record("Opacus", 1.0),))).rows == []


def test_every_workload_names_its_best_peer():
    assert every_workload(RUN).rows[0] == ["w0", "1.00 ms", "9.00", "0.50", "Opacus hooks: 2.00"]
    assert every_workload(RUN).rows[2] == ["w2", "10.0 ms", "2.00", "1.30", "–"]
    assert sweep_part(RUN).startswith("Measured so far: 4 of 40 workloads.\nTime of a clipped mean")
    assert "| persample eager | all | 4 |" in sweep_part(RUN)


# Processes and the run.


@pytest.mark.parametrize("shared", [False, True])
def test_methods_of_one_workload_share_a_process_in_a_sweep(shared, monkeypatch):
    started = []

    class Fake:
        about, used, is_alive, workload = {"methods": [["m", ["mean"]]], "packages": {}}, False, True, ""

        def __init__(self, environment, **options):
            self.environment = environment
            started.append(self)

        def end(self):
            self.is_alive = False

    monkeypatch.setattr("benchmarks.workers.Process", Fake)
    monkeypatch.setattr("benchmarks.workers.PYTHONS", {"torch": ROOT})
    with Workers(shared=shared) as workers:
        (method,) = workers.methods
        for workload, trial in (("a", 0), ("a", 0), ("b", 0), ("b", 1)):
            with workers.of(Cell(workload, "mean", method), trial) as process:
                process.used = True
    assert len(started) == (3 if shared else 4)
    assert not any(process.is_alive for process in started)


@pytest.mark.slow
def test_a_smoke_run_of_the_sweep(tmp_path):
    path = tmp_path / "sweep.json"
    command = [sys.executable, "-m", "benchmarks.run", "--sweep", "--quick", "--only", EAGER, "--results", str(path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    results = read(path)
    assert [(found.workload, found.method) for found in results.records] == [(name, EAGER) for name in draws.QUICK]
    assert all(found.status == "ok" and found.error < 1e-4 for found in results.records)
    assert results.targets == ()
    assert distribution(results).rows[0][:3] == [EAGER, "all", "2"]
