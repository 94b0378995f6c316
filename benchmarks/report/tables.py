"""Tables of all methods on all workloads, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.report.records import LIMITS, UNIT, Record, Results
from benchmarks.report.standings import cost, is_ours
from benchmarks.report.text import Grid, escaped, memory, number, seconds, shortened, table


def ordered(methods: Iterable[str]) -> list[str]:
    """Order methods as all tables and figures do: the unit, limits, ours, then the others in the given order.

    Args:
        methods: their names, repeated or not.

    Returns:
        The distinct names.

    Examples:
        >>> ordered(["naive loop", "persample", "fill_", "batch gradient", "naive loop"])
        ['batch gradient', 'fill_', 'persample', 'naive loop']
    """

    def rank(method: str) -> int:
        return (method.startswith(UNIT), method in LIMITS, is_ours(method), True).index(True)

    return sorted(dict.fromkeys(methods), key=rank)


def environment_grid(environment: dict[str, Any]) -> Grid:
    """List the environment of a run.

    Args:
        environment: versions and hardware; nested dicts are flattened.

    Returns:
        The table.

    Examples:
        >>> environment_grid({"cpu": "a CPU", "gpu": None, "peers": {"jax": "0.9"}}).rows
        [['cpu', 'a CPU'], ['jax', '0.9']]
    """
    flat: dict[str, Any] = {}
    for name, value in environment.items():
        flat |= value if isinstance(value, dict) else {name: value}
    rows = [
        [shortened(name.replace("_", " ")), shortened(str(value))] for name, value in flat.items() if value is not None
    ]
    return Grid(("what", "value"), rows)


def short_table(results: Results, quantity: str, workloads: Sequence[str], methods: Sequence[str]) -> str:
    """Compare a few methods on a few workloads.

    Args:
        results: of a run.
        quantity: what is computed.
        workloads: the rows; workloads that are not in the run are omitted.
        methods: the columns, without those that the run does not have; each of ours that captures the loss is followed
            by a column of its first calls.

    Returns:
        The table of times relative to one batch gradient.
    """
    found = {(r.method, r.workload): r for r in results.records if r.quantity == quantity and r.method not in LIMITS}
    shown = [workload for workload in workloads if any(w == workload for _, w in found)]
    measured = [method for method in methods if any(m == method for m, _ in found)]
    columns = [(method, first) for method in measured for first in ((False, True) if _captures(method) else (False,))]
    rows = []
    for workload in shown:
        best = _lowest(r for (_, w), r in found.items() if w == workload)
        cells = [_short_cell(found.get((method, workload)), best, first) for method, first in columns]
        rows.append([workload, _unit_time(results, workload), *cells])
    headings = [f"{_name(method)}, first call" if first else _name(method) for method, first in columns]
    return table(("workload", UNIT, *headings), rows, numbers=range(1, len(columns) + 2))


def _captures(method: str) -> bool:
    return is_ours(method) and ("traced" in method or "compiled" in method)


def _short_cell(record: Record | None, best: float | None, first: bool) -> str:
    if not first:
        return _ratio(record, best)
    return "" if record is None or record.first_call_s is None else seconds(record.first_call_s)


def _unit_time(results: Results, workload: str) -> str:
    return next((seconds(r.unit_s) for r in results.records if r.workload == workload and r.unit_s is not None), "")


def _name(method: str) -> str:
    return f"**{method}**" if is_ours(method) else method


def _lowest(records: Iterable[Record]) -> float | None:
    return min((ratio for r in records if (ratio := cost(r, "time")) is not None), default=None)


def _ratio(record: Record | None, best: float | None) -> str:
    if record is None:
        return ""
    ratio = cost(record, "time")
    if ratio is None:
        return record.status
    return f"**{number(ratio)}**" if ratio == best else number(ratio)


def full_table(results: Results, workload: str, quantity: str) -> str:
    """List all measurements of one quantity of one workload.

    Args:
        results: of a run.
        workload: the name of the workload.
        quantity: what is computed.

    Returns:
        The table, with one row per method; the row of a method that failed gives its own message.
    """
    records = {r.method: r for r in results.records if (r.workload, r.quantity) == (workload, quantity)}
    best = _lowest(r for r in records.values() if r.method not in LIMITS)
    headings = ("method", "ratio", "time", "peak memory", "first call", "largest error, or why not")
    return table(headings, [_row(records[method], best) for method in ordered(records)], numbers=range(1, 5))


def _row(record: Record, best: float | None) -> list[str]:
    ratio = _ratio(record, best)
    if record.status != "ok":
        return [_name(record.method), ratio, "", "", "", escaped(shortened(record.reason))]
    return [
        _name(record.method),
        ratio if record.ratio_iqr is None else f"{ratio} ± {number(record.ratio_iqr / 2)}",
        "" if record.median_s is None else seconds(record.median_s),
        "" if record.peak_bytes is None else memory(record.peak_bytes),
        "" if record.first_call_s is None else seconds(record.first_call_s),
        "" if record.error is None or record.method in LIMITS else f"{record.error:.0e}",
    ]


def unit_line(results: Results, workload: str) -> str:
    """State the cost of one batch gradient of a workload.

    Args:
        results: of a run.
        workload: the name of the workload.

    Returns:
        The sentence.
    """
    records = [record for record in results.records if record.workload == workload]
    time = _unit_time(results, workload) or "not measured"
    peak = next((f", {memory(r.unit_peak_bytes)}" for r in records if r.unit_peak_bytes is not None), "")
    return f"One batch gradient: {time}{peak}."
