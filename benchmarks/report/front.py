"""What README and the summary say of the committed runs: headlines, how often we are ahead, first calls, processors."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.report.page import machine
from benchmarks.report.records import Record, Results
from benchmarks.report.standings import cost, standings
from benchmarks.report.text import Grid, number, seconds, words

WIDE, SMALL = (
    "wide MLP 5120, B=32",
    "TD(0) MLP 64, B=256",
)  # rows of gigabytes; most time is Python's


def headlines(run: Results, large: Iterable[Results], quantity: str, ours: Sequence[str], peer: str) -> str:
    """State what one call costs in batch gradients, for large models, for wide layers, and for a small network.

    Args:
        run: README's run.
        large: the runs of large models.
        quantity: what was computed.
        ours: the default engine's method, and the fastest one.
        peer: the method that writes the gradients out.

    Returns:
        A list, with a line for each that was measured.
    """
    at = {(r.workload, r.method): r for r in run.records if r.quantity == quantity and r.status == "ok"}
    default, fastest = ours
    lines = [_large(x, default) for x in large]
    wide, stacked = at.get((WIDE, default)), at.get((WIDE, peer))
    if wide and stacked:
        lines.append(
            f"Large layers ({WIDE}): {_cost(wide)} and {_memory(wide)}; {peer}, which writes the gradients out, takes "
            f"{_cost(stacked)} and {_memory(stacked)}."
        )
    small, compiled = at.get((SMALL, default)), at.get((SMALL, fastest))
    if small and compiled and compiled.first_call_s is not None:
        lines.append(
            f"A small network ({SMALL}): {_cost(small)} by the default engine, most of it in Python; compiled "
            f"{_cost(compiled)}, after a first call of {seconds(compiled.first_call_s)}."
        )
    return "".join(f"- {line}\n" for line in lines if line)


def _large(run: Results, method: str) -> str:
    rows = [r for r in run.records if r.method == method and r.status == "ok"]
    costs = [f"{r.workload.partition(', ')[2]}: {_cost(r)}, {_share(r)} of its memory" for r in rows]
    return f"{rows[0].workload.partition(',')[0]} from transformers, unpatched ({'; '.join(costs)})." if rows else ""


def _share(record: Record) -> str:
    return number(record.peak_bytes / record.unit_peak_bytes) if record.peak_bytes and record.unit_peak_bytes else "–"


def _cost(record: Record) -> str:
    return "–" if record.ratio is None else f"{number(record.ratio)} × its time"


def _memory(record: Record) -> str:
    return "–" if record.peak_bytes is None else f"{record.peak_bytes / 2**20:,.0f} MiB"


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
