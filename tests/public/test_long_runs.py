"""Long runs: flat memory, no reference left, threads, and the workers of data loaders."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from oracle import assert_trees_close
from paths import TESTS
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.data import DataLoader, Dataset

import persample as ps
from persample import clear_cache, per_sample_grads
from persample.engines.compiled.capture import Entry
from persample.engines.compiled.graph import Capture

F64 = torch.float64
REDUCE = {"mean": ps.ClippedMean(0.3), "norm": ps.Norm()}


def ran(engine, calls):
    script = TESTS / "long_run.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(ps.__file__).parents[1])}
    command = [sys.executable, str(script), engine, str(calls)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout)


def assert_nothing_stays(found, most):
    assert found["seen"] >= 30
    assert found["alive"] == 0
    assert found["kept"] <= 40  # compiled programs of the latest losses
    curve = found["curve"]
    print([round(x, 1) for x in curve])
    assert curve[-1] - curve[len(curve) // 2] < most, curve


@pytest.mark.parametrize(("engine", "calls"), [("eager", 100), ("loop", 20), ("traced", 10)])
def test_memory_is_flat(engine, calls):
    assert_nothing_stays(ran(engine, calls), 8)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "calls"), [("eager", 10_000), ("loop", 10_000), ("traced", 10_000)])
def test_memory_is_flat_in_a_long_run(engine, calls):
    assert_nothing_stays(ran(engine, calls), 12)


# Losses made anew

KEPT_BY_TORCH = 64  # the losses whose bytecode was translated last


def powers(number):
    """A loss of its own code: they differ in what is captured."""
    source = f"def loss(w, x):\n    return ((w * x).sum() + {number}) ** {2 + number % 3}\n"
    space = {"__name__": __name__}
    exec(source, space)
    return space["loss"]


def alive():
    """How many captures are alive, and how many of torch's records of one trace."""
    while gc.collect():
        pass
    return Counter(type(x) for x in gc.get_objects() if type(x) in (Entry, Capture, ShapeEnv, FakeTensorMode))


@pytest.mark.parametrize("count", [4, pytest.param(1000, marks=pytest.mark.slow)])
def test_dropped_losses_leave_nothing(count):
    clear_cache()
    w, x = torch.randn(3), torch.randn(9, 3)
    before = alive()
    for number in range(count):
        per_sample_grads(powers(number), w, x, ps.Norm(), engine="traced")
    found = alive() - before
    assert found[Capture] == min(count, KEPT_BY_TORCH)
    assert max(found.values()) <= 2 * KEPT_BY_TORCH, found
    clear_cache()
    assert not alive() - before


# Threads


def in_threads(works):
    """Run functions in threads of their own, all at once; raise the first error of theirs."""
    errors, ready = [], threading.Barrier(len(works))

    def run(work):
        try:
            ready.wait(60)
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("calls", [6, pytest.param(400, marks=pytest.mark.slow)])
def test_eight_threads_with_different_losses(calls):
    clear_cache()
    w, x = torch.randn(3, dtype=F64), torch.randn(9, 3, dtype=F64)
    losses = [powers(number) for number in range(8)]
    expected = [per_sample_grads(loss, w, x, REDUCE, engine="loop") for loss in losses]

    def work(number):
        for repeat in range(calls):
            engine = ("eager", "traced", "auto", "loop")[(number + repeat) % 4]
            chunk_size = None if engine == "traced" else (None, 4)[repeat % 2]
            found = per_sample_grads(losses[number], w, x, REDUCE, engine=engine, chunk_size=chunk_size)
            assert_trees_close(found, expected[number], 1e-9)

    in_threads([lambda number=number: work(number) for number in range(8)])


@pytest.mark.parametrize("calls", [6, pytest.param(400, marks=pytest.mark.slow)])
def test_four_threads_with_one_module(calls):
    clear_cache()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    before = {name: (x, x.detach().clone()) for name, x in model.named_parameters()}
    batches = [torch.randn(5 + number, 3, dtype=F64) for number in range(4)]
    expected = [per_sample_grads(squares, model, (x,), REDUCE, engine="loop") for x in batches]

    def work(number):
        for repeat in range(calls):
            engine = ("eager", "traced", "auto", "loop")[(number + repeat) % 4]
            if repeat % 4 == 3:
                with pytest.raises(RuntimeError, match="shapes"):
                    per_sample_grads(squares, model, (batches[number][:, :2],), REDUCE, engine=engine)
            found = per_sample_grads(squares, model, (batches[number],), REDUCE, engine=engine)
            assert_trees_close(found, expected[number], 1e-9)

    in_threads([lambda number=number: work(number) for number in range(4)])
    assert all(x is before[name][0] and torch.equal(x, before[name][1]) for name, x in model.named_parameters())


def squares(model, x):
    return model(x).square().sum()


# Workers of data loaders


class GradientNorms(Dataset):
    """Item i holds norms that its worker computed: workers import the library, or inherit it."""

    def __init__(self, engine):
        torch.manual_seed(0)
        self.engine, self.model = engine, nn.Linear(3, 1).double()
        self.x = torch.randn(4, 5, 3, dtype=F64)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return per_sample_grads(squares, self.model, (self.x[index],), ps.Norm(), engine=self.engine)


@pytest.mark.parametrize(("engine", "method"), [("eager", "fork"), ("loop", "fork"), ("eager", "spawn")])
def test_workers_of_a_data_loader(engine, method):
    data = GradientNorms(engine)
    expected = torch.stack([data[i] for i in range(len(data))])
    loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context=method)
    found = []
    for rows in loader:
        found.append(rows)
        assert_trees_close(per_sample_grads(squares, data.model, (data.x[0],), ps.Norm()), expected[0], 1e-12)
    assert_trees_close(torch.cat(found), expected, 1e-12)


def test_a_fork_inherits_programs():
    clear_cache()
    data = GradientNorms("traced")
    expected = torch.stack([data[i] for i in range(len(data))])
    loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork")
    assert_trees_close(torch.cat(list(loader)), expected, 1e-12)
