"""Freed memory that the next call takes again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

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
print(min(faults_of_a_call() for _ in range(8)))  # without the block, thousands
"""
FULL = """
import resource, torch
from persample.utils.numerics import keep_freed_memory

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
keep_freed_memory()
print(1)
"""
pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries keep freed memory by other rules"
)


def printed_by(program):
    decides = ("MALLOC_", "GLIBC_", "LD_PRELOAD")
    env = {name: value for name, value in os.environ.items() if not name.startswith(decides)}
    run = subprocess.run([sys.executable, "-c", program], env=env, check=True, capture_output=True, text=True)
    return int(run.stdout)


def test_the_next_call_meets_no_fresh_pages():
    assert printed_by(PROGRAM) <= 100


def test_a_block_that_cannot_be_had_is_no_error():
    assert printed_by(FULL)
