"""A run of ``accumulate`` that kills its process at an event, or at none, which is 0.

Events are what touches files of the folder (open, rename, remove, truncate), and the batches.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys

import pytest
import torch
from seams import commits_after_every_batch
from torch import nn

import persample as ps

BATCHES = 30


def loss(model, x):
    return (model(x) * torch.rand(())).square().sum(), {"x": x}


def run(folder, event, *, resume):
    commits_after_every_batch(pytest.MonkeyPatch())  # so that there is more to interrupt
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    counter = itertools.count(1)

    def tick():
        if next(counter) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    def batches():
        for number in range(BATCHES):
            tick()
            yield torch.randn(number % 4, 3)  # drawn from the stream that the loss draws from, too

    def audit(name, args):
        if name in {"open", "os.rename", "os.remove", "os.truncate"} and str(args[0]).startswith(str(folder)):
            tick()

    if event:
        sys.addaudithook(audit)
    wanted = {"rows": None, "norms": ps.Norm(), "aux": ps.Aux(), "mean": ps.Mean(), "variance": ps.Variance()}
    return ps.accumulate(loss, model, batches(), wanted, randomness="different", sink=folder, resume=resume)
