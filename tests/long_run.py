"""Many calls in one process, each with another size and a loss of its own: does memory stay flat?

``python tests/long_run.py eager 10000`` prints, as JSON, the resident memory in MiB after each twentieth of the
calls, what the library keeps, and how many of the losses, modules and batches are still alive.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import weakref
from pathlib import Path

import torch
from compiler import compilations
from torch import nn

import persample as ps
from persample.engines.compiled import capture
from persample.utils import isolation

POINTS = 20


def resident() -> float:
    """The resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def kept() -> int:
    """How many things the library keeps between calls."""
    return len(capture._entries) + compilations() + len(isolation._locks)


def new_loss(scale):
    return lambda model, x: (scale * model(x)).square().sum()


def new_module(number):
    return nn.Sequential(nn.Linear(3, 4 + number % 3), nn.Tanh(), nn.Linear(4 + number % 3, 1))


class Batch:
    """Holds a batch, so that a weak reference can tell whether anything keeps it."""

    def __init__(self, number: int) -> None:
        self.x = torch.randn(2 + number % 7, 3)


def run(engine: str, calls: int) -> dict[str, object]:
    """Call ``per_sample_grads`` with losses, modules and batches that are dropped after a while."""
    curve, found = [], []
    model, batch, loss = new_module(0), Batch(0), new_loss(1.0)
    for number in range(calls):
        if number % 10 == 0:
            model = new_module(number)
        batch, loss = Batch(number), new_loss(1.0 + number % 5)
        reduce = ({"norm": ps.Norm(), "mean": ps.Mean()}, ps.ClippedMean(0.5), ps.Stack())[number % 3]
        ps.per_sample_grads(loss, model, (batch.x,), reduce, engine=engine)
        if number % max(1, calls // 50) == 0:
            found += [weakref.ref(model), weakref.ref(batch.x), weakref.ref(loss)]
        if number % 5 == 4:  # an error keeps nothing, either
            with contextlib.suppress(RuntimeError):
                ps.per_sample_grads(loss, model, (batch.x[:, :2],), reduce, engine=engine)
        if (number + 1) % max(1, calls // POINTS) == 0:
            gc.collect()
            curve.append(resident())
    del model, batch, loss
    gc.collect()
    return {"curve": curve, "kept": kept(), "alive": sum(ref() is not None for ref in found), "seen": len(found)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump(run(sys.argv[1], int(sys.argv[2])), sys.stdout)
