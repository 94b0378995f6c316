"""Time and memory of the TD(0) MLP over the batch size and over the width, until a method fails."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.cells import Cell, Listed
from benchmarks.report.records import UNIT, Record, ScalingRecord

BATCH_SIZES, HIDDEN = (1, 16, 256, 4096, 16384), 64
WIDTHS, BATCH_SIZE = (16, 64, 256, 1024, 2048), 256
# (batch size, width)
SIZES = tuple(dict.fromkeys([*((b, HIDDEN) for b in BATCH_SIZES), *((BATCH_SIZE, h) for h in WIDTHS)]))
QUANTITIES = ("stack", "clipped_mean")
# The points of a smoke run.
QUICK_SIZES, QUICK_QUANTITIES, QUICK_METHODS = ((8, HIDDEN),), ("clipped_mean",), (UNIT, "persample eager")


@dataclass(frozen=True)
class Point:
    """One point of a curve.

    Args:
        cell: the measured cell; the unit computes the mean on every curve.
        quantity: the quantity of the curve.
        batch_size: B.
        hidden: width of the hidden layers.
    """

    cell: Cell
    quantity: str
    batch_size: int
    hidden: int

    @property
    def key(self) -> tuple[str, str, int, int]:
        """The key of its record."""
        return self.cell.method.name, self.quantity, self.batch_size, self.hidden

    @property
    def label(self) -> str:
        """The label on the screen, which --only searches."""
        return f"scaling, {self.cell.workload}, {self.quantity}, {self.cell.method.name}"

    def record(self, record: Record) -> ScalingRecord:
        """Return the record of the cell as a record of the point."""
        return ScalingRecord(*self.key, record.status, record.reason, record.median_s, record.peak_bytes)


def points(methods: Iterable[Listed], *, quick: bool = False, only: Sequence[str] = ()) -> list[Point]:
    """List the points by size, small ones first."""
    found = [
        Point(Cell(f"TD(0) MLP {hidden}, B={batch_size}", of, method), quantity, batch_size, hidden)
        for batch_size, hidden in (QUICK_SIZES if quick else SIZES)
        for method in methods
        for quantity in (QUICK_QUANTITIES if quick else QUANTITIES)
        for of in [quantity if method.name != UNIT else "mean"]
        if of in method.shown_for and (not quick or method.name in QUICK_METHODS)
    ]
    return [point for point in found if all(text in point.label for text in only)]


def has_given_up(point: Point, done: Iterable[ScalingRecord]) -> bool:
    """Return whether the method failed at a smaller size; a method that refuses B = 1 may accept larger sizes."""
    return any(
        record.status != "ok"
        and (record.status != "cannot" or record.batch_size > 1)
        and (record.method, record.quantity) == (point.cell.method.name, point.quantity)
        and record.batch_size <= point.batch_size
        and record.hidden <= point.hidden
        for record in done
    )
