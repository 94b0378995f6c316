"""The cost of chunks and units, the savings of several reductions in one call: ``make bench``, compared in groups."""

from __future__ import annotations

import pytest
import torch

from benchmarks.methods.unit import prepare
from benchmarks.workloads import build
from persample import ClippedMean, Mean, Norm, per_sample_grads
from persample.utils.measure import peak_memory

WANTED = (Mean(), ClippedMean(1.0), Norm())


def ours(work, reduce, **options):
    return per_sample_grads(work.loss_fn, work.model, work.batch, reduce, **options)


def shuffled(work):
    """Return the ids of units of 4 samples in random order."""
    size = len(work.batch[0])
    return (torch.arange(size) // 4)[torch.randperm(size, generator=torch.Generator().manual_seed(0))]


METHODS = {
    "batch gradient": lambda work: prepare(work, "mean").run(),
    "ClippedMean": lambda work: ours(work, ClippedMean(1.0)),
    "ClippedMean in 4 chunks": lambda work: ours(work, ClippedMean(1.0), chunk_size=-(-len(work.batch[0]) // 4)),
    "ClippedMean of units of 4": lambda work: ours(work, ClippedMean(1.0), unit=4),
    "ClippedMean of units of 4, shuffled": lambda work: ours(work, ClippedMean(1.0), unit=shuffled(work)),
    "Mean, ClippedMean and Norm in one call": lambda work: ours(work, WANTED),
    "Mean, ClippedMean and Norm in three calls": lambda work: [ours(work, reduce) for reduce in WANTED],
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("workload", ["TD(0) MLP 256, B=1024", "REINFORCE MLP 64, 32x200", "transformer tied, B=16"])
def test_options(benchmark, workload, method):
    work = build(workload)
    benchmark.group = f"options, {workload}"
    benchmark.pedantic(METHODS[method], args=(work,), rounds=7, warmup_rounds=2)
    benchmark.extra_info["peak_mib"] = round(peak_memory(lambda: METHODS[method](work)) / 2**20, 1)
