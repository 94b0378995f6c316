"""Freed memory that the next call takes again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# Blocks as a program of medium size has them: the largest of 2 MiB, 32 MiB together.
PROGRAM = """
import resource, torch
from persample import Norm, per_sample_grads

def faults_of_a_call():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**19) for _ in range(16)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
loss = lambda w, x: (w * x).sum()
per_sample_grads(loss, torch.ones(2), (torch.ones(3, 2),), Norm(), engine="compiled")
print([faults_of_a_call() for _ in range(4)][-1])  # without the program, most processes meet 8000 pages
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


def test_after_a_compiled_program_the_next_call_meets_no_fresh_pages():
    assert printed_by(PROGRAM) <= 100


def test_a_block_that_cannot_be_had_is_no_error():
    assert printed_by(FULL)
