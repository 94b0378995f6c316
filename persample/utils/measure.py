"""Time and peak memory of function calls, for the command line, the notebooks and the benchmarks."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping

from torch.profiler import ProfilerActivity, profile

from persample.utils.trees import Tree


def time_rounds(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each function, by name: one warm-up each, then rounds in which each runs once.

    Alternating calls share the slow phases of the machine, so that the ratios of their times hold.
    """
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    collecting = gc.isenabled()
    try:
        for _ in range(rounds):
            gc.collect()
            gc.disable()
            for name, call in calls.items():
                start = time.perf_counter()
                result = call()
                seconds[name].append(time.perf_counter() - start)
                del result  # the clock excludes freeing the result
    finally:
        if collecting:
            gc.enable()
    return seconds


def peak_memory(call: Callable[[], object]) -> int:
    """Measure the peak bytes that a call allocates on the CPU, beyond the bytes held before it.

    They are the running sum of the profiler's memory events. They count torch's allocator, results included, not the
    process: they are exact, and equal in every run.

    Examples:
        >>> import torch
        >>> peak_memory(lambda: torch.ones(250) + torch.ones(250))  # both terms and the sum
        3000
    """
    held = peak = 0
    for nbytes in allocations(call):
        held += nbytes
        peak = max(peak, held)
    return peak


def allocations(call: Callable[[], object]) -> list[int]:
    """Return the bytes of all allocations (negative: of deallocations) on the CPU, in order."""
    # Otherwise kineto writes a line to stderr at every start and stop. It reads the variable once, at its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    del result
    results: Tree = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    ordered = sorted(events, key=lambda event: event.start_ns())
    return [event.nbytes() for event in ordered if event.device_type().name == "CPU"]
