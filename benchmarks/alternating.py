"""Times of functions that alternate in one process, and medians over several processes."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import get_context
from typing import Any

# Times differ by a tenth or more from process to process, with the memory that each happens to get.
_PROCESSES = 3


def medians(calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the median CPU seconds of each function, after two calls that do not count.

    Args:
        calls: the functions; each round calls all, in an order drawn anew.
        seconds: the time for all rounds together.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for name in order * 2:
        calls[name]()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        random.shuffle(order)
        for name in order:
            start = time.process_time()
            calls[name]()
            times[name].append(time.process_time() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def medians_of_processes(
    measure: Callable[..., Sequence[float]], tasks: Iterable[tuple[Any, ...]]
) -> list[list[float]]:
    """Return the medians of what several new processes measure, one after the other, for each task.

    Args:
        measure: a function of a module, which returns as many numbers in each process.
        tasks: its arguments.
    """
    repeated = [task for task in tasks for _ in range(_PROCESSES)]
    with get_context("spawn").Pool(1, maxtasksperchild=1) as process:
        found = process.starmap(measure, repeated, chunksize=1)
    of_tasks = [found[start : start + _PROCESSES] for start in range(0, len(found), _PROCESSES)]
    return [[statistics.median(numbers) for numbers in zip(*rows, strict=True)] for rows in of_tasks]
