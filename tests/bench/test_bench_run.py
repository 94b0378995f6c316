"""The benchmark's runner: workers, turns, results that are resumed; and a smoke run from end to end."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks import compile_time, measure, process, run, scaling, session, stopwatch
from benchmarks.cells import MEASURED, Cell, Listed, cells
from benchmarks.methods.method import CannotError, Method, Prepared
from benchmarks.oracle import write
from benchmarks.process import ROOT, FailedError, Process
from benchmarks.report.files import read
from benchmarks.report.records import UNIT, Record, ScalingRecord
from benchmarks.worker import Worker, serve
from persample.errors import ArgumentError

SMALL = "TD(0) MLP 16, B=5"
OURS = Listed("ours", "torch", ("mean", "norms"))


# The worker.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("truth")
    write(SMALL, folder, ["norms"])
    return str(folder)


@pytest.fixture(autouse=True)
def unlimited(monkeypatch):
    """Workers limit the memory of their process; here that is the test's own."""
    limits = []
    monkeypatch.setattr(stopwatch, "limit_memory", lambda extra, cuda: limits.append(extra))
    return limits


def talk(methods, *requests, takes_saved=False):
    lines, answers = [json.dumps(request) + "\n" for request in requests], io.StringIO()
    serve(Worker({method.name: method for method in methods}, takes_saved), lines, answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def of_torch(run, name="m", **options):
    return Method(name, "torch", lambda work, quantity: Prepared(lambda: run(work), lambda result: result, **options))


def true_norms(folder):
    return np.load(f"{folder}/norms.npz")["result"]


def prepare_request(folder, method="m"):
    asked = {"do": "prepare", "method": method, "workload": SMALL, "quantity": "norms"}
    return {**asked, "folder": folder, "limit": 2**30}


def test_a_worker_measures(folder, unlimited):
    method = of_torch(lambda work: true_norms(folder).astype("f4"), setup_seconds=100.0)
    asked = prepare_request(folder), {"do": "time", "times": 3, "warm_up": True}, {"do": "memory"}
    about, prepared, timed, memory = talk([method], *asked)
    assert about["methods"] == [["m", list(method.shown_for), False, ""]]
    assert (prepared["status"], prepared["reason"]) == ("ok", "")
    assert prepared["first_call_s"] > 100 > prepared["call_s"] > 0
    assert 0 < prepared["error"] < 1e-6
    assert len(timed["seconds"]) == 3
    assert min(timed["seconds"]) > 0
    assert memory["peak_bytes"] is None or 0 <= memory["peak_bytes"] < 2**30
    assert unlimited == [2**30]


def test_memory_behind_a_pool_is_not_measured(folder, unlimited):
    method = of_torch(lambda work: true_norms(folder), has_pool=True)
    assert talk([method], prepare_request(folder), {"do": "memory"})[-1]["peak_bytes"] is None


def test_a_worker_without_torch_gets_what_was_saved(folder):
    seen = []

    def prepare(work, quantity):
        seen.append((work.kind, quantity, work.params.keys()))
        return Prepared(lambda: true_norms(folder), lambda result: result)

    assert talk([Method("m", "jax", prepare)], prepare_request(folder), takes_saved=True)[1]["status"] == "ok"
    assert seen == [("td_mlp", "norms", {"0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"})]


def failing(error):
    def prepare(work, quantity):
        raise error

    return Method("m", "torch", prepare)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (failing(CannotError("no")), {"status": "cannot", "reason": "no", "untouched": True}),
        (failing(KeyError("a\n  b")), {"status": "cannot", "reason": r"KeyError: 'a\n b'"}),
        (failing(ValueError("x" * 500)), {"status": "cannot", "reason": "ValueError: " + "x" * 199 + "…"}),
        (failing(MemoryError()), {"status": "out of memory", "reason": "asks for more than 1 GiB"}),
        (
            failing(RuntimeError("RESOURCE_EXHAUSTED: 9")),
            {"status": "out of memory", "reason": "asks for more than 1 GiB"},
        ),
    ],
    ids=["cannot", "library error", "long", "memory", "memory of JAX"],
)
def test_a_worker_says_why_not(method, expected, folder):
    assert talk([method], prepare_request(folder))[1] == expected


def test_a_wrong_result_is_told(folder):
    answer = talk([of_torch(lambda work: true_norms(folder) * 2)], prepare_request(folder))[1]
    assert (answer["status"], answer["error"]) == ("wrong", pytest.approx(1.0))
    assert answer["reason"] == "differs from the loop in float64 by 1 of the largest value"


def test_a_limit_is_not_checked(folder):
    limit = replace(of_torch(lambda work: None), is_limit=True)
    assert talk([limit], prepare_request(folder))[1]["status"] == "ok"


def test_other_numbers_from_the_same_seed_are_noticed(folder, tmp_path):
    write("TD(0) MLP 16, B=4", tmp_path, ["norms"])
    answer = talk([of_torch(lambda work: 0)], prepare_request(str(tmp_path)))[1]
    assert answer["reason"] == "RuntimeError: the same seed gives other numbers in this environment"


# Time and memory.


def test_seconds_leave_out_warm_up_and_freeing():
    class Slow:
        def __del__(self):
            time.sleep(0.02)

    calls = []
    found = stopwatch.seconds(lambda: calls.append(0) or Slow(), 2, warm_up=True)
    assert len(calls) == 3
    assert max(found) < 0.02


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts resident bytes")
def test_peak_bytes_are_resident_bytes_above_those_held():
    held = np.ones(2**22)
    assert stopwatch.peak_bytes(lambda: [held + held, held * 2]) == pytest.approx(2**26, rel=0.1)
    assert stopwatch.peak_bytes(lambda: None) < 2**20
    assert stopwatch.peak_bytes(lambda: np.empty(2**26)) < 2**20  # never touched


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts resident bytes")
def test_memory_that_earlier_calls_freed_counts_again():
    call = lambda: [np.ones(2**12) for _ in range(1024)]  # 32 MiB, in pieces that the allocator keeps
    kept = call()[-1]  # above what is freed, so that the heap cannot shrink
    assert stopwatch.peak_bytes(call) == pytest.approx(2**25, rel=0.1)
    assert kept.all()


def test_the_memory_limit_stops_allocations():
    code = (
        "import numpy as np; from benchmarks import stopwatch; stopwatch.limit_memory(2**28)\n"
        "np.ones(2**24)\n"
        "try: np.ones(2**26)\n"
        "except MemoryError as error: print(stopwatch.is_out_of_memory(error))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "True\n"


def test_on_cuda_events_and_the_allocator_are_asked(monkeypatch):
    log = []
    event = lambda enable_timing: SimpleNamespace(record=lambda: log.append("record"), elapsed_time=lambda end: 250.0)
    fake = SimpleNamespace(
        Event=event,
        synchronize=lambda: log.append("synchronize"),
        reset_peak_memory_stats=lambda: log.append("reset"),
        memory_allocated=lambda: 100,
        max_memory_allocated=lambda: 175,
    )
    monkeypatch.setattr(torch, "cuda", fake)
    assert stopwatch.seconds(lambda: log.append("call"), 1, warm_up=False, cuda=True) == [0.25]
    assert log == ["synchronize", "record", "call", "record", "synchronize"]
    log.clear()
    assert stopwatch.peak_bytes(lambda: log.append("call"), cuda=True) == 75
    assert log == ["synchronize", "reset", "call", "synchronize"]


# Processes.


@pytest.fixture
def stub(monkeypatch, tmp_path):
    """Replace the workers' Python by a shell script."""

    def make(script):
        path = tmp_path / "python"
        path.write_text(f'#!/bin/sh\necho \'{{"methods": [], "packages": {{}}}}\'\n{script}\n')
        path.chmod(path.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setitem(process.PYTHONS, "torch", path)
        return Process("torch")

    return make


@pytest.mark.parametrize(
    ("script", "status", "reason"),
    [
        ("sleep 60", "too slow", "took more than 0 s"),
        ("read line; echo broken pipe dream >&2; exit 3", "cannot", "the process ended with code 3: broken pipe dream"),
        ("read line; exit 4", "cannot", "the process ended with code 4: no output"),
        ("read line; kill -9 $$", "out of memory", "the system ended the process"),
        ('read line; echo \'{"status": "wrong", "reason": "by far"}\'; sleep 60', "wrong", "by far"),
    ],
)
def test_a_process_that_fails(stub, script, status, reason):
    worker = stub(script)
    with pytest.raises(FailedError) as failed:
        worker.ask("time", 0.2 if "read" not in script else 20)
    assert (failed.value.status, failed.value.reason) == (status, reason)
    assert worker.used
    worker.end()


def test_a_process_that_only_refused_is_as_good_as_new(stub):
    answer = '{"status": "cannot", "reason": "no", "untouched": true}'
    worker = stub(f"read line; echo '{answer}'; read line; echo '{{}}'; sleep 60")
    with pytest.raises(FailedError, match="no"):
        worker.ask("prepare", 20)
    assert not worker.used
    assert worker.ask("time", 20) == {}
    assert worker.used
    worker.end()


# Turns.


class FakeProcess:
    environment, used = "torch", True

    def __init__(self, call_s=0.01, peak_bytes=123, **prepared):
        self.call_s, self.peak_bytes, self.asked, self.prepared = call_s, peak_bytes, [], prepared

    def ask(self, do, timeout, **arguments):
        self.asked.append(do)
        if do == "prepare" and "status" in self.prepared:
            raise FailedError(**self.prepared)
        if do == "prepare":
            return {"first_call_s": 9.0, "call_s": self.call_s, "error": 1e-7}
        if do == "time":
            return {"seconds": [self.call_s] * arguments["times"]}
        return {"peak_bytes": self.peak_bytes}


def test_method_and_unit_take_turns():
    log = []
    worker, unit = FakeProcess(0.02), FakeProcess(0.01)
    worker.asked = unit.asked = log
    turn = measure.Turn(unit, measure.Pace(), 0.0, 0.01, None)
    record = measure.measure(Cell("w", "norms", OURS), worker, "", measure.Pace(), turn)
    assert (record.status, record.ratio, record.ratio_iqr, record.median_s, record.unit_s) == ("ok", 2, 0, 0.02, 0.01)
    assert (record.peak_bytes, record.first_call_s, record.error) == (123, 9.0, 1e-7)
    assert log == ["prepare", *["time"] * (2 * record.rounds), "memory"]
    assert record.rounds == round(1.0 / (0.02 * 2 + 0.01 * 3))  # each turn fills 20 ms, after a call that is not timed


@pytest.mark.parametrize(("call_s", "rounds"), [(1e-6, 50), (2e-3, 45), (0.01, 33), (1.0, 5), (7.9, 5)])
def test_rounds_follow_the_pace(call_s, rounds):
    record = measure.measure(Cell("w", "norms", OURS), FakeProcess(call_s), "", measure.Pace())
    assert (record.rounds, record.ratio, record.unit_s) == (pytest.approx(rounds, abs=1), None, None)


def test_too_slow_is_known_before_the_rounds():
    worker = FakeProcess(13.0)
    record = measure.measure(Cell("w", "norms", OURS), worker, "", measure.Pace())
    assert (record.status, record.reason, worker.asked) == ("too slow", "one call takes 13 s", ["prepare"])


def test_more_than_the_budget_is_too_much():
    record = measure.measure(Cell("w", "norms", OURS), FakeProcess(peak_bytes=5 * 2**30), "", measure.Pace())
    assert (record.status, record.reason) == ("out of memory", "needs 5.0 GiB, more than 4")
    assert (record.peak_bytes, record.median_s) == (5 * 2**30, None)


def test_what_is_wrong_is_not_timed():
    worker = FakeProcess(status="wrong", reason="by far", error=0.5)
    record = measure.measure(Cell("w", "norms", OURS), worker, "", measure.Pace())
    assert (record.status, record.reason, record.error, record.median_s) == ("wrong", "by far", 0.5, None)
    assert worker.asked == ["prepare"]


# What is measured, and what is kept.


def test_cells_and_points_are_chosen_by_their_labels():
    every = Listed("other", "torch", ("stack", "clipped_mean"))
    unit = Listed(UNIT, "torch", ("mean",))
    assert len(cells([every])) == sum(q in {"stack", "clipped_mean"} for of in MEASURED.values() for q in of)
    (cell,) = cells([OURS, every, unit], only=["TD(0) MLP 256, B=256", "norms"])
    assert cell.label == "TD(0) MLP 256, B=256, norms, ours"
    assert cells([every], only=["scaling"]) == []
    found = scaling.points([every, unit], only=["MLP 64, B=1,"])
    assert [point.key for point in found] == [(n, q, 1, 64) for n in ("other", UNIT) for q in ("stack", "clipped_mean")]
    assert [point.cell.quantity for point in found] == ["stack", "clipped_mean", "mean", "mean"]
    sizes = {key[2:] for key in (point.key for point in scaling.points([every]))}
    assert {b for b, _ in sizes} >= {1, 16384}
    assert {h for _, h in sizes} >= {16, 2048}


@pytest.mark.parametrize(
    ("record", "given_up"),
    [
        (ScalingRecord("ours", "mean", 64, 64, "too slow"), True),
        (ScalingRecord("ours", "mean", 64, 64, "ok"), False),
        (ScalingRecord("ours", "norms", 64, 64, "too slow"), False),
        (ScalingRecord("theirs", "mean", 64, 64, "too slow"), False),
        (ScalingRecord("ours", "mean", 64, 128, "too slow"), False),
        (ScalingRecord("ours", "mean", 512, 64, "out of memory"), False),
        (ScalingRecord("ours", "mean", 1, 64, "too slow"), True),
        (ScalingRecord("ours", "mean", 1, 64, "cannot"), False),
        (ScalingRecord("ours", "mean", 16, 64, "cannot"), True),
    ],
)
def test_a_method_that_failed_is_not_asked_for_more(record, given_up):
    point = scaling.Point(Cell("w", "mean", OURS), "mean", 256, 64)
    assert scaling.has_given_up(point, [record]) == given_up


class FakeWorkers:
    cuda, packages, methods = False, {"jax": "1"}, [Listed(UNIT, "torch", ("mean",)), OURS]

    def __init__(self, **answers):
        self.answers = answers

    def of(self, cell, trial=0):
        return contextlib.nullcontext(self.answers.get(cell.method.name, FakeProcess()))


@pytest.fixture
def sessions(monkeypatch, tmp_path):
    monkeypatch.setattr(session, "truth_of", lambda workload, quantities: contextlib.nullcontext("folder"))
    return lambda processes=1, workers=FakeWorkers, **answers: session.Session(
        workers(**answers), tmp_path / "r.json", measure.Pace(processes=processes), lambda label, record: None
    )


RECORD = Record("w", "norms", "ours", "ok", median_s=1.0)
WANTED = [Cell("w", "mean", OURS), Cell("w", "norms", OURS), Cell("v", "norms", OURS)]


def test_results_are_resumed(sessions, tmp_path):
    first = sessions()
    assert first.missing(WANTED) == WANTED
    first.measure_cells(WANTED[:2])
    second = sessions()
    assert second.missing(WANTED) == WANTED[2:]
    second.measure_cells(WANTED[2:])
    results = read(tmp_path / "r.json")
    assert [record.key for record in results.records] == [cell.key for cell in WANTED]
    assert {record.unit_peak_bytes for record in results.records} == {123}
    assert results.targets == session.TARGETS
    assert (results.environment["peers"], results.environment["gpu"]) == ({"jax": "1"}, None)


class UnevenWorkers(FakeWorkers):
    """Another process for each trial: of our method they take 30, 10 and 20 ms; of another one the second fails."""

    def of(self, cell, trial=0):
        fails = cell.method.name == "theirs" and trial == 1
        prepared = {"status": "too slow", "reason": "one call"} if fails else {}
        calls = {"ours": (0.03, 0.01, 0.02)}.get(cell.method.name, (0.01,) * 3)
        return contextlib.nullcontext(FakeProcess(calls[trial], **prepared))


def test_the_middle_process_counts_and_a_failure_ends_the_trials(sessions, tmp_path):
    theirs = replace(OURS, name="theirs")
    wanted = [Cell("w", "norms", OURS), Cell("w", "norms", theirs)]
    sessions(3, UnevenWorkers).measure_cells(wanted)
    ours, failed = sorted(read(tmp_path / "r.json").records, key=lambda record: record.method)
    assert (ours.ratio, ours.median_s, ours.processes) == (2, 0.02, 3)
    assert (failed.status, failed.reason, failed.processes) == ("too slow", "one call", 1)


def test_the_first_process_has_the_first_call():
    measured = (2.0, 60.0), (1.0, 8.0), (3.0, 7.0)
    records = [replace(RECORD, ratio=ratio, first_call_s=first) for ratio, first in measured]
    assert measure.middle(records) == replace(RECORD, ratio=2.0, first_call_s=60.0, processes=3)
    assert measure.middle(records[1:] + records[:1]) == replace(RECORD, ratio=2.0, first_call_s=8.0, processes=3)


def test_a_limit_that_is_written_for_some_workloads_has_rows_for_those_only():
    limit = replace(OURS, is_limit=True, shown_for=("clipped_mean",), shown_on="TD(0) MLP")
    assert {cell.workload.startswith("TD(0) MLP") for cell in cells([limit])} == {True}


def test_points_end_where_a_method_gives_up(sessions):
    points = [scaling.Point(Cell(f"w{b}", "mean", OURS), "mean", b, 64) for b in (1, 8, 64)]
    one = sessions(ours=FakeProcess(13.0))
    one.measure_points(points)
    assert one.missing(points) == []  # 8 and 64 are given up, not missing
    others = [replace(point, quantity="norms") for point in points]
    assert one.missing(others) == others


def test_results_of_another_machine_are_refused(sessions, tmp_path):
    sessions().measure_cells(WANTED)
    path = tmp_path / "r.json"
    path.write_text(path.read_text().replace('"cpu": "', '"cpu": "Z80 '))
    with pytest.raises(ArgumentError, match=r"results: expected the results of this machine, whose cpu is .* r\.json"):
        sessions()


# From end to end.


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = CliRunner().invoke(run.app, ["--cuda"])
    assert found.exit_code == 2
    assert "torch sees no GPU here" in found.output


def test_a_smoke_run_is_interrupted_and_goes_on(tmp_path):
    path = tmp_path / "quick.json"
    # Of `--quick`, one method and its scaling: the others are called in this process by test_bench_workloads.
    command = [sys.executable, "-m", "benchmarks.run", "--quick", "--only", "persample eager", "--results", str(path)]
    quiet = {"cwd": ROOT, "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "stdout": subprocess.PIPE, "text": True}
    # Processes in the background of a script ignore Ctrl-C, and so would those that they start.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, preexec_fn=heard, **quiet) as first:  # noqa: PLW1509 - no threads here
        while not path.exists() and first.poll() is None:
            time.sleep(0.05)
        first.send_signal(signal.SIGINT)
        output, _ = first.communicate()
    assert first.returncode == 130
    assert "Stopped." in output
    before = read(path).records
    assert len(before) >= 1
    subprocess.run(command, check=True, **quiet)
    results = read(path)
    assert results.records[: len(before)] == before
    ours = {record.method: record for record in results.records if record.method.startswith("persample")}
    assert ours.keys() == {"persample eager"}
    for record in ours.values():
        assert record.status == "ok"
        assert record.ratio == pytest.approx(record.median_s / record.unit_s, rel=5)
        assert record.error < 1e-4
    (point,) = results.scaling
    assert (point.method, point.status) == ("persample eager", "ok")


def test_a_longer_first_call_pays_for_itself_after_some_calls_or_never():
    slow, fast = (
        compile_time.Cell(imports=0, first=1, later=0.25, unit=0.125),
        compile_time.Cell(imports=1, first=2, later=0.125, unit=0.125),
    )
    assert compile_time.calls_to_pay(fast, slow) == 16  # 2 s over 0.125 s a call
    assert compile_time.calls_to_pay(slow, fast) == math.inf
    assert compile_time.calls_to_pay(fast._replace(imports=0, first=0), slow) == 1
