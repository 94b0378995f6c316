"""The sweep: how our times are distributed over workloads whose sizes are drawn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.report.records import UNIT, Record, Results
from benchmarks.report.standings import Standing, cost, is_ours, standings
from benchmarks.report.text import Grid, number, seconds

EAGER, COMPILED = "persample eager", "persample compiled"
# Seconds of a batch gradient above which the overhead of a call is small.
LONG = 5e-3
_SHARE = 0.9


def distribution(results: Results) -> Grid:
    """Summarize the times of each of our methods, in batch gradients.

    Args:
        results: of a sweep.

    Returns:
        The table: median, 90 % and worst ratio, and the share of workloads in which the method is ahead of the best
        peer or alone; over all workloads, and over those whose batch gradient takes long. A failure counts as ∞.
    """
    rows = []
    for method in dict.fromkeys(record.method for record in results.records if is_ours(record.method)):
        for name, found in _groups(results, method).items():
            if found:
                rows.append(
                    [method, name, str(len(found)), *map(_ratio, spread(_costs(found))), f"{_ahead(found):.0%}"]
                )
    headings = ("method", "workloads", "number", "median", f"{_SHARE:.0%}", "worst", "ahead of the best peer")
    return Grid(headings, rows, numbers=range(2, 7))


def goals(results: Results) -> Grid:
    """Compare the distribution with the goals.

    Those of the eager engine are for batch gradients that take long: in shorter ones the fixed cost of a call counts.

    Args:
        results: of a sweep.

    Returns:
        The table, without rows if our methods have none.
    """
    rows = []
    for method, group, measure, limit in (
        (EAGER, _LONG_ONES, "median", 1.6),
        (EAGER, _LONG_ONES, "worst", 3.0),
        (COMPILED, "all", "median", 0.95),
        (COMPILED, "all", "worst", 1.25),
    ):
        if found := _groups(results, method)[group]:
            median, _, worst = spread(_costs(found))
            value = median if measure == "median" else worst
            goal = f"{method}, {measure} of {group}: ≤ {limit:g}"
            rows.append([goal, _ratio(value), "yes" if value <= limit else "no"])
    if found := _groups(results, COMPILED)["all"]:
        share = _ahead(found)
        goal = f"{COMPILED}, ahead of the best peer: ≥ {_SHARE:.0%}"
        rows.append([goal, f"{share:.0%}", "yes" if share >= _SHARE else "no"])
    return Grid(("goal", "measured", "met"), rows, numbers={1})


def every_workload(results: Results) -> Grid:
    """List the workloads.

    Args:
        results: of a sweep.

    Returns:
        The table: the batch gradient's time, ratios of our methods, and the best peer with its ratio.
    """
    found = {(record.workload, record.method): record for record in results.records}
    ours = [method for method in dict.fromkeys(method for _, method in found) if is_ours(method)]
    rows = []
    for standing in standings(results, "time"):
        workload, peer = standing.workload, standing.peer
        times = [_short(found.get((workload, method))) for method in ours]
        unit = standing.ours.unit_s
        best = f"{peer.method}: {_short(peer)}" if peer else "–"
        rows.append([workload, "" if unit is None else seconds(unit), *times, best])
    return Grid(("workload", UNIT, *ours, "best peer"), rows, numbers=range(1, len(ours) + 2))


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the value that 90 % do not exceed, and the largest.

    Args:
        values: at least one.

    Returns:
        The three numbers.

    Examples:
        >>> spread([5.0, 1.0, 3.0, 2.0, 4.0, 6.0, 9.0, 7.0, 8.0, 10.0])
        (5.5, 9.0, 10.0)
    """
    ordered = sorted(values)
    return statistics.median(ordered), ordered[math.ceil(_SHARE * len(ordered)) - 1], ordered[-1]


_LONG_ONES = f"those over {seconds(LONG)}"


def _groups(results: Results, method: str) -> dict[str, list[Standing]]:
    found = standings(results, "time", method)
    return {"all": found, _LONG_ONES: [one for one in found if (_unit(results, one) or 0) > LONG]}


def _unit(results: Results, standing: Standing) -> float | None:
    return next((r.unit_s for r in results.records if r.workload == standing.workload and r.unit_s is not None), None)


def _costs(found: Sequence[Standing]) -> list[float]:
    costs = (cost(standing.ours, "time") for standing in found)
    return [math.inf if ratio is None else ratio for ratio in costs]


def _ahead(found: Sequence[Standing]) -> float:
    return sum(standing.verdict in {"ahead", "alone"} for standing in found) / len(found)


def _ratio(value: float) -> str:
    return number(value) if math.isfinite(value) else "–"


def _short(record: Record | None) -> str:
    if record is None:
        return ""
    ratio = cost(record, "time")
    return record.status if ratio is None else number(ratio)
