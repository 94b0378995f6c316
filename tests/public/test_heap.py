"""Freed memory that the next call takes again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from persample import Norm, per_sample_grads
from persample.engines.compiled import lower
from persample.utils import numerics

# Blocks as a program of medium size has them: the largest of 2 MiB, 32 MiB together.
PROGRAM = """
import resource, torch
from persample.utils.numerics import keep_freed_memory

def faults_of_a_call():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**19) for _ in range(16)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
keep_freed_memory()  # without it, most processes meet 8000 pages in every call
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


def test_compiled_programs_keep_what_they_free(monkeypatch):
    kept = []
    monkeypatch.setattr(lower, "keep_freed_memory", lambda: kept.append(True))
    for engine in ("eager", "compiled"):
        per_sample_grads(lambda w, x: (w * x).sum(), torch.ones(2), (torch.ones(3, 2),), Norm(), engine=engine)
        assert bool(kept) == (engine == "compiled")
