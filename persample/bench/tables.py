"""What every method did on every workload, in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from persample.bench.records import LIMITS, UNIT, Record, Results
from persample.bench.standings import cost, is_ours
from persample.bench.text import Grid, escaped, mebibytes, number, seconds, shortened, table, words

# Seconds of a first call from which on it is in the tables.
_WORTH_SAYING = 1.0


def ordered(methods: Iterable[str]) -> list[str]:
    """Order methods as all tables and figures do: references first, then ours, then the others as they come.

    Args:
        methods: their names, repeated or not.

    Returns:
        Each once.

    Examples:
        >>> ordered(["naive loop", "persample", "fill_", "batch gradient", "naive loop"])
        ['batch gradient', 'fill_', 'persample', 'naive loop']
    """

    def rank(method: str) -> int:
        return (method.startswith(UNIT), method in LIMITS, is_ours(method), True).index(True)

    return sorted(dict.fromkeys(methods), key=rank)


def environment_grid(environment: dict[str, Any]) -> Grid:
    """List what a run was made on.

    Args:
        environment: of the run; entries of dicts are listed one by one.

    Returns:
        The table.

    Examples:
        >>> environment_grid({"cpu": "a CPU", "gpu": None, "peers": {"jax": "0.9"}}).rows
        [['cpu', 'a CPU'], ['jax', '0.9']]
    """
    flat: dict[str, Any] = {}
    for name, value in environment.items():
        flat |= value if isinstance(value, dict) else {name: value}
    rows = [[name.replace("_", " "), str(value)] for name, value in flat.items() if value is not None]
    return Grid(("what", "value"), rows, left=2)


def short_table(results: Results, quantity: str, workloads: Sequence[str]) -> str:
    """Compare all methods on a few workloads.

    Args:
        results: of a run.
        quantity: what is computed.
        workloads: the columns; those that the run does not have are left out.

    Returns:
        The table of ratios to one batch gradient, and a line on the methods that have no row in it.
    """
    columns = [workload for workload in workloads if any(r.workload == workload for r in results.records)]
    found = {(r.method, r.workload): r for r in results.records if r.quantity == quantity and r.method not in LIMITS}
    best = {workload: _lowest((r for (_, w), r in found.items() if w == workload)) for workload in columns}
    rows, without = [_unit_row(results, columns)], []
    for method in ordered(method for method, _ in found if method != UNIT):
        cells = [found.get((method, workload)) for workload in columns]
        if not any(cell and cell.status in {"ok", "wrong"} for cell in cells):
            without.append(method)
            continue
        ratios = [_ratio(cell, best[workload]) for cell, workload in zip(cells, columns, strict=True)]
        rows.append([_name(method), *ratios])
    line = f"\nWithout a {words(quantity)} of any of these: {', '.join(without)}.\n" if without else ""
    return table((f"{words(quantity)}, time relative to one batch gradient", *columns), rows) + line


def _unit_row(results: Results, columns: Sequence[str]) -> list[str]:
    times = {r.workload: r.unit_s for r in reversed(results.records) if r.unit_s is not None}
    return [f"{UNIT} (time)", *(seconds(times[w]) if w in times else "" for w in columns)]


def _name(method: str) -> str:
    return f"**{method}**" if is_ours(method) else method


def _lowest(records: Iterable[Record]) -> float | None:
    return min((ratio for r in records if (ratio := cost(r, "time")) is not None), default=None)


def _ratio(record: Record | None, best: float | None, *, spread: bool = False) -> str:
    if record is None:
        return ""
    ratio = cost(record, "time")
    if ratio is None:
        return record.status
    text = number(ratio)
    text = f"**{text}**" if ratio == best else text
    return f"{text} ± {number(record.ratio_iqr / 2)}" if spread and record.ratio_iqr is not None else text


def workload_table(results: Results, workload: str) -> str:
    """Show everything about one workload.

    Args:
        results: of a run.
        workload: its name.

    Returns:
        What the batch gradient costs, a table of time and memory with a row per method and a column per quantity, and
        what the methods that cannot do it say.
    """
    records = [record for record in results.records if record.workload == workload]
    quantities = list(dict.fromkeys(record.quantity for record in records))
    best = {q: _lowest(r for r in records if r.quantity == q and r.method not in LIMITS) for q in quantities}
    cells = {(record.method, record.quantity): record for record in records}
    rows = [
        [_name(method), *(_cell(cells.get((method, quantity)), best[quantity]) for quantity in quantities)]
        for method in ordered(record.method for record in records)
    ]
    return f"{_unit(records)}\n\n{table(('method', *map(words, quantities)), rows)}{_reasons(records)}"


def _unit(records: Sequence[Record]) -> str:
    time = next((seconds(r.unit_s) for r in records if r.unit_s is not None), "not measured")
    memory = next((mebibytes(r.unit_peak_bytes) for r in records if r.unit_peak_bytes is not None), None)
    return f"One batch gradient: {time}" + (f", {memory}." if memory else ".")


def _cell(record: Record | None, best: float | None) -> str:
    parts = [_ratio(record, best, spread=True)]
    if record is not None and record.status == "ok":
        parts += [] if record.peak_bytes is None else [mebibytes(record.peak_bytes)]
        first = record.first_call_s or 0.0
        parts += [f"first {seconds(first)}"] if first >= _WORTH_SAYING else []
    return "<br>".join(parts)


def _reasons(records: Sequence[Record]) -> str:
    """List who fails at what, in their words; what fails for one reason is one line."""  # noqa: DOC201
    failures: dict[tuple[str, str], dict[str, list[str]]] = {}
    for record in records:
        if record.status != "ok":
            methods = failures.setdefault((record.status, record.reason), {})
            methods.setdefault(record.method, []).append(words(record.quantity))
    tried = Counter(record.method for record in records)
    lines = []
    for (status, reason), methods in failures.items():
        who = [f"{m} ({'all' if len(q) == tried[m] else ', '.join(q)})" for m, q in methods.items()]
        lines.append(f"- {'; '.join(who)}: {status}: {escaped(shortened(reason))}\n")
    return "".join(["\n", *lines]) if lines else ""
