"""The data of the figures."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.report.records import FILL, GEMMS, LIMITS, UNIT, Record, Results, ScalingRecord
from benchmarks.report.standings import Compared, cost
from benchmarks.report.styles import Style, styles
from benchmarks.report.tables import ordered
from benchmarks.report.text import shortened, words

# Quantities with a figure of memory: stacked gradients must be stored, clipped means need not be.
_MEMORY = {"stack", "clipped_mean"}


@dataclass(frozen=True)
class Dots:
    """A logarithmic dot plot: one row per workload, one dot per method.

    Args:
        title: the title of the figure.
        label: the label of the axis.
        rows: the workloads.
        series: for each method its style and one value per row, None where there is none.
        marks: the reference value of each row, None where there is none.
    """

    title: str
    label: str
    rows: tuple[str, ...]
    series: dict[str, tuple[Style, tuple[float | None, ...]]]
    marks: tuple[float | None, ...]


@dataclass(frozen=True)
class Line:
    """A method's scaling curve.

    Args:
        style: color and marker.
        sizes: the sizes that the method computed.
        times: median seconds at each size.
        peaks: peak bytes at each size, None where unknown.
        end: the first failing size and its reason; empty if no size failed.
    """

    style: Style
    sizes: tuple[int, ...]
    times: tuple[float, ...]
    peaks: tuple[int | None, ...]
    end: str


@dataclass(frozen=True)
class Curves:
    """Time and memory over a size, both logarithmic.

    Args:
        title: the title of the figure.
        label: the label of the size axis.
        lines: one curve per method.
    """

    title: str
    label: str
    lines: dict[str, Line]


def fingerprint(plot: Any) -> str:
    """Hash the data of a figure.

    Args:
        plot: the data, a dataclass.

    Returns:
        The hash, which the picture stores: pictures with equal hashes show equal data.

    Examples:
        >>> plots = [Dots("times", "ratio", (row,), {}, (1.0,)) for row in ("TD(0)", "TD(0)", "DQN")]
        >>> len({fingerprint(plot) for plot in plots})
        2
    """
    content = json.dumps([type(plot).__name__, asdict(plot)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def plots(results: Results) -> dict[str, Dots | Curves]:
    """Collect the data of all figures.

    Args:
        results: of a run.

    Returns:
        The plots by name: the times of each quantity, the memory of stacked gradients and clipped means, scaling.
    """
    looks = styles([*(r.method for r in results.records), *(p.method for p in results.scaling)])
    quantities = dict.fromkeys(record.quantity for record in results.records)
    dots = {f"time-{quantity}": _times(results.records, quantity, looks) for quantity in quantities}
    for quantity in (q for q in quantities if q in _MEMORY):
        dots[f"memory-{quantity}"] = _memory(results.records, quantity, looks)
    found: dict[str, Dots | Curves] = {name: plot for name, plot in dots.items() if plot.series}
    for quantity in dict.fromkeys(point.quantity for point in results.scaling if point.method not in LIMITS):
        found |= _scaling(_curves_of(quantity, results.scaling), quantity, looks)
    return found


def _times(records: Sequence[Record], quantity: str, looks: dict[str, Style]) -> Dots:
    label = "time relative to one batch gradient (dashed),\nlog scale"
    rows = _workloads(records, quantity)
    return Dots(words(quantity), label, rows, _series(records, quantity, "time", looks), (1.0,) * len(rows))


def _memory(records: Sequence[Record], quantity: str, looks: dict[str, Style]) -> Dots:
    rows = _workloads(records, quantity)
    units = {r.workload: r.unit_peak_bytes / 2**20 for r in records if r.unit_peak_bytes}
    marks = tuple(units.get(row) for row in rows)
    label = "peak extra memory [MiB], log scale\n(dashed: one batch gradient)"
    return Dots(words(quantity), label, rows, _series(records, quantity, "memory", looks), marks)


def _workloads(records: Sequence[Record], quantity: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(record.workload for record in records if record.quantity == quantity))


def _series(
    records: Sequence[Record], quantity: str, measure: Compared, looks: dict[str, Style]
) -> dict[str, tuple[Style, tuple[float | None, ...]]]:
    """Return the series of all methods with a number. The unit is drawn as the mark of each row instead."""
    scale = 1.0 if measure == "time" else 2.0**-20
    costs = {(r.method, r.workload): cost(r, measure) for r in records if r.quantity == quantity and r.method != UNIT}
    able = ordered(method for (method, _), amount in costs.items() if amount)
    rows = _workloads(records, quantity)
    return {method: (looks[method], tuple(_scaled(costs.get((method, row)), scale) for row in rows)) for method in able}


def _scaled(amount: float | None, scale: float) -> float | None:
    return amount * scale if amount else None  # zero has no logarithm


def _curves_of(quantity: str, points: Iterable[ScalingRecord]) -> list[ScalingRecord]:
    limit = FILL if quantity == "stack" else GEMMS
    return [p for p in points if p.method == limit or (p.quantity == quantity and p.method not in LIMITS)]


def _scaling(points: Sequence[ScalingRecord], quantity: str, looks: dict[str, Style]) -> dict[str, Dots | Curves]:
    """Return one figure over the batch size, at the width that has most of them, and one over the width."""
    batch_sizes, widths = ({(p.hidden, p.batch_size) for p in points}, {(p.batch_size, p.hidden) for p in points})
    hidden, batch_size = (Counter(fixed for fixed, _ in pairs).most_common(1)[0][0] for pairs in (batch_sizes, widths))
    over_batch = {p: p.batch_size for p in points if p.hidden == hidden}
    over_width = {p: p.hidden for p in points if p.batch_size == batch_size}
    of_batch, of_width = f"TD(0) MLP 8-{hidden}-{hidden}-1", f"TD(0) MLP, B = {batch_size}"
    what, width = words(quantity), "width of the two hidden layers"
    return {
        f"scaling-{quantity}-batch": Curves(f"{what}, {of_batch}", "batch size B", _lines(over_batch, looks)),
        f"scaling-{quantity}-width": Curves(f"{what}, {of_width}", width, _lines(over_width, looks)),
    }


def _lines(sizes: dict[ScalingRecord, int], looks: dict[str, Style]) -> dict[str, Line]:
    methods: dict[str, list[ScalingRecord]] = {method: [] for method in ordered(p.method for p in sizes)}
    for point in sorted(sizes, key=sizes.__getitem__):
        methods[point.method].append(point)
    return {method: _line(points, sizes, looks[method]) for method, points in methods.items()}


def _line(points: Sequence[ScalingRecord], size_of: dict[ScalingRecord, int], look: Style) -> Line:
    done = [(size_of[p], p.median_s, p.peak_bytes) for p in points if p.status == "ok" and p.median_s is not None]
    sizes, times, peaks = zip(*done, strict=True) if done else ((), (), ())
    # The curve ends at the first failure beyond the largest size that worked.
    failed = [p for p in points if p.status != "ok" and size_of[p] > max(sizes, default=0)]
    ends = [f"{p.status} at {size_of[p]}: {shortened(p.reason)}" for p in failed]
    return Line(look, sizes, times, peaks, ends[0] if ends else "")
