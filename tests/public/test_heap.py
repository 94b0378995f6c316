"""Freed memory that the next call takes again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from persample.utils import numerics

# Gradients and activations of 40 MiB together, the largest block of 2 MiB.
PROGRAM = """
import resource, torch
from persample import ClippedMean, per_sample_grads

def faults_of_a_call():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    per_sample_grads(lambda model, x: model(x).square().sum(), model, x, ClippedMean(1.0))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
model, x = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))), torch.randn(1024, 512)
print([faults_of_a_call() for _ in range(4)][-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep freed memory by other rules")
def test_the_next_call_meets_no_fresh_pages():
    decides = ("MALLOC_", "GLIBC_", "LD_PRELOAD")
    env = {name: value for name, value in os.environ.items() if not name.startswith(decides)}
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=env, check=True, capture_output=True, text=True)
    assert int(run.stdout) <= 100


def test_a_block_that_cannot_be_had_is_no_error(monkeypatch):
    monkeypatch.setattr(numerics, "_LARGEST", 2**60)
    assert numerics.keep_freed_memory.__wrapped__() is None
