"""Summary tables of a run: standings, losses, goals."""

from __future__ import annotations

from collections import Counter

from benchmarks.report.outcomes import Outcome, outcomes
from benchmarks.report.records import Record, Results
from benchmarks.report.standings import MARGIN, Compared, Notes, Standing, Verdict, is_ours, losses, standings
from benchmarks.report.text import Grid, escaped, memory, number, shortened, words

_VERDICTS: tuple[Verdict, ...] = ("alone", "ahead", "even", "behind")
_MEASURES: tuple[Compared, ...] = ("time", "memory")


def standings_grid(results: Results) -> Grid:
    """Count for each of our methods the pairs in which it is ahead, even, behind, or alone.

    Args:
        results: of a run.

    Returns:
        The table.
    """
    rows = []
    for method in dict.fromkeys(r.method for r in results.records if is_ours(r.method)):
        for measure in _MEASURES:
            counts = Counter(standing.verdict for standing in standings(results, measure, method))
            rows.append([method, measure, *(str(counts[verdict]) for verdict in _VERDICTS)])
    headings = ("method", "compared by", "no other can", "ahead", f"within {MARGIN:.0%}", "behind")
    return Grid(headings, rows, numbers=range(2, 6))


def losses_grid(results: Results) -> Grid:
    """List the pairs in which another method is ahead of all of ours.

    Args:
        results: of a run.

    Returns:
        The table, without rows if there are no losses.
    """
    headings = ["workload", "quantity", "compared by", "our best", "best of the others", "ours / theirs"]
    rows = [[s.workload, words(s.quantity), s.measure, *_pair(s), _factor(s)] for s in losses(results)]
    return Grid(headings, rows, numbers={5})


def losses_list(results: Results, notes: Notes | None = None) -> str:
    """List the same pairs in Markdown, with their reasons.

    Args:
        results: of a run.
        notes: the reasons, by (workload, quantity, measure), in Markdown; None omits them.

    Returns:
        One item per pair.
    """
    items = []
    for standing in losses(results):
        what = f"{standing.workload}, {words(standing.quantity)}, {standing.measure}"
        reason = f" {notes[standing.key]}" if notes else ""
        ours, theirs = map(escaped, _pair(standing))
        items.append(f"- **{escaped(what)}**: {ours}; {theirs} ({_factor(standing)} ×).{reason}\n")
    return "".join(items)


def _pair(standing: Standing) -> list[str]:
    return [f"{r.method}: {_amount(r, standing.measure)}" if r else "" for r in (standing.ours, standing.peer)]


def _factor(standing: Standing) -> str:
    return number(standing.factor) if standing.factor < float("inf") else "–"


def _amount(record: Record, measure: str) -> str:
    if record.status != "ok":
        return f"{record.status} ({shortened(record.reason)})"
    if measure == "memory" and record.peak_bytes is not None:
        return memory(record.peak_bytes)
    return number(record.ratio) if record.ratio is not None else "not measured"


def goals_grid(results: Results) -> Grid:
    """List every goal beside the measured value.

    Args:
        results: of a run.

    Returns:
        The table.
    """
    headings = ("workload", "quantity", "method", "goal", "measured", "met")
    return Grid(headings, [_goal(outcome) for outcome in outcomes(results)], numbers={4})


def _goal(outcome: Outcome) -> list[str]:
    target = outcome.target
    unit = "s" if target.relative_to is None else f"× {target.relative_to}"
    unit += f" ({words(target.relative_quantity)})" if target.relative_quantity else ""
    measure = "" if target.measure == "time" else f"{target.measure} "
    return [
        target.workload,
        words(target.quantity),
        target.method,
        f"{measure}≤ {target.limit:g} {unit}",
        shortened(outcome.reason) if outcome.value is None else number(outcome.value),
        "yes" if outcome.met else "no",
    ]
