"""What README says of the committed runs: how often we are ahead, what first calls cost, what other processors give."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping

from benchmarks.report.page import machine
from benchmarks.report.records import Record, Results
from benchmarks.report.standings import cost, standings
from benchmarks.report.text import Grid, number, seconds, words


def verdicts(run: Results, default: str) -> str:
    """Count how often we are ahead, with the fastest of our methods and with the default engine alone.

    Args:
        run: a run.
        default: the name of the default engine's method.

    Returns:
        The sentences.
    """
    ours, alone = (Counter(s.verdict for s in standings(run, "time", method)) for method in (None, default))
    return (
        f"Of {ours.total()} pairs of a workload and a quantity, the fastest of our methods is ahead of all others in "
        f"{ours['ahead'] + ours['alone']}, within 5 % of the best in {ours['even']}, and behind in {ours['behind']}.\n"
        f"The default engine alone is ahead in {alone['ahead'] + alone['alone']}, within 5 % in {alone['even']}, and "
        f"behind in {alone['behind']}."
    )


def first_calls(run: Results, methods: Iterable[str]) -> str:
    """Say how long first calls took.

    Args:
        run: a run.
        methods: names of methods.

    Returns:
        The sentence, with the shortest and the longest first call of each method.
    """
    taken = {
        method: sorted(r.first_call_s for r in run.records if r.method == method and r.first_call_s is not None)
        for method in methods
    }
    parts = [f"{seconds(times[0])} to {seconds(times[-1])} ({method})" for method, times in taken.items() if times]
    *most, last = parts or [""]
    listed = f"{', '.join(most)} and {last}" if most else last
    return f"First calls took {listed}; a compiled one includes compilation." if parts else ""


def processors(runs: Mapping[str, Results], quantity: str, methods: Iterable[str]) -> Grid:
    """Summarize each run in a row.

    Args:
        runs: the runs by name.
        quantity: what was computed.
        methods: names of methods; those that no run has are left out.

    Returns:
        The table: for each method the median, smallest and largest time over the workloads, in batch gradients.
    """
    measured = {r.method for run in runs.values() for r in run.records}
    methods = [method for method in methods if method in measured]
    rows = [
        [machine(run.environment), *(_spread(run.records, quantity, method) for method in methods)]
        for run in runs.values()
    ]
    return Grid((f"{words(quantity)}: median (range) of the workloads", *methods), rows, range(1, len(methods) + 1))


def _spread(records: Iterable[Record], quantity: str, method: str) -> str:
    costs = [cost(r, "time") for r in records if r.quantity == quantity and r.method == method]
    known = [ratio for ratio in costs if ratio is not None]
    return f"{number(statistics.median(known))} ({number(min(known))} to {number(max(known))})" if known else "–"
