"""Times of functions that alternate in one process: medians of CPU seconds."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping


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
