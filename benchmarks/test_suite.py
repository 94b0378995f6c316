"""Every method that needs torch alone, in one process, with the batch gradient in every group: ``make bench``.

Ratios hold within a group. A method that cannot do a workload is skipped with its reason (``-rs`` shows it).
``peak_mib`` is the largest sum of bytes that torch's allocator held beyond what it held before, in one call. Peers in
environments of their own, and memory of whole processes, are measured by ``benchmarks/run.py``.
"""

from __future__ import annotations

import functools
import time

import pytest
import torch

from benchmarks.cells import MEASURED, is_shown
from benchmarks.methods import load
from benchmarks.oracle import oracle
from benchmarks.quantities import agrees
from benchmarks.report.records import UNIT
from benchmarks.workloads import build
from persample.utils.measure import peak_memory

METHODS = load("torch")
CASES = [
    (workload, quantity, method)
    for workload, quantities in MEASURED.items()
    for quantity in quantities
    for method in METHODS.values()
    if method.name == UNIT or is_shown(method, workload, quantity)
]

# One workload and one truth at a time: some are large.
workload_of = functools.lru_cache(maxsize=1)(build)


@functools.lru_cache(maxsize=1)
def truth_of(workload, quantity):
    return oracle(build(workload).to(torch.float64), quantity)


@pytest.mark.parametrize(("workload", "quantity", "method"), CASES, ids=lambda x: getattr(x, "name", x))
def test_suite(benchmark, workload, quantity, method):
    computed = "mean" if method.name == UNIT else quantity
    try:
        prepared = method.prepare(workload_of(workload), computed)
        prepared.run()
    except Exception as error:  # noqa: BLE001 - whatever a library raises is its answer
        pytest.skip(f"{type(error).__name__}: {error}")
    start = time.perf_counter()
    result = prepared.run()
    rounds = min(max(round(1 / (time.perf_counter() - start)), 3), 50)
    if not method.is_limit and method.name != UNIT:
        _, wrong = agrees(prepared.numpy(result), truth_of(workload, quantity), quantity)
        assert wrong is None
    del result
    benchmark.group = f"{workload}, {quantity}"
    benchmark.pedantic(prepared.run, rounds=rounds, warmup_rounds=1)
    benchmark.extra_info["peak_mib"] = round(peak_memory(prepared.run) / 2**20, 2)
