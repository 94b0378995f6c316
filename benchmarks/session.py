"""A run: measures what a results file lacks, and updates the file after the last process of every cell."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.cells import Cell
from benchmarks.machine import run_environment
from benchmarks.measure import Pace, Turn, measure, middle, set_up
from benchmarks.report.files import merge, read, write
from benchmarks.report.records import UNIT, Record, Results, Target
from benchmarks.scaling import Point, has_given_up
from benchmarks.targets import TARGETS
from benchmarks.workers import Workers, truth_of
from persample.errors import ArgumentError

# All measurements of a file agree in these entries, as they are compared with each other.
SAME = ("cpu", "logical_cores", "gpu", "torch", "torch_threads")
T = TypeVar("T", Cell, Point)


class Session:
    """Measures cells and points, one after the other.

    Args:
        workers: the processes.
        path: the results file, read now and written after the last process of every cell.
        pace: the duration of measurements.
        report: called with each label and record.
        targets: the limits that the file states.

    Raises:
        ArgumentError: if the results file comes from another machine.
    """

    def __init__(
        self,
        workers: Workers,
        path: Path,
        pace: Pace,
        report: Callable[[str, Record], object],
        targets: tuple[Target, ...] = TARGETS,
    ):
        self._workers, self._path, self._pace, self._report = workers, path, pace, report
        self._results = Results({**run_environment(cuda=workers.cuda), "peers": workers.packages}, targets=targets)
        if path.exists():
            before = read(path)
            check_same(path, before.environment, self._results.environment)
            self._results = merge([replace(before, targets=()), self._results])

    def missing(self, wanted: Sequence[T]) -> list[T]:
        """Return what has no record yet, without points beyond a failure."""
        done = {record.key for record in (*self._results.records, *self._results.scaling)}
        return [one for one in wanted if one.key not in done and not self._is_given_up(one)]

    def _is_given_up(self, one: Cell | Point) -> bool:
        return isinstance(one, Point) and has_given_up(one, self._results.scaling)

    def measure_cells(self, cells: Sequence[Cell]) -> None:
        """Measure cells, each alternating with the unit of its workload."""
        (unit,) = (method for method in self._workers.methods if method.name == UNIT)
        for workload, group in _grouped(cells, lambda cell: cell.workload):
            with truth_of(workload, {cell.quantity for cell in group}) as folder:
                self._workload(Cell(workload, "mean", unit), group, folder)

    def _workload(self, of_unit: Cell, cells: Sequence[Cell], folder: str) -> None:
        open_cells: list[tuple[Cell, list[Record]]] = [(cell, []) for cell in cells]
        last = self._pace.processes - 1
        for trial in range(self._pace.processes):
            if not open_cells:  # all have failed
                return
            with self._workers.of(of_unit, trial) as process:
                unit = set_up(of_unit, process, folder, self._pace)
                peak = unit.peak_bytes()
                for cell, records in open_cells:
                    record = self._measure(cell, folder, unit, trial)
                    records.append(replace(record, unit_peak_bytes=peak) if record.status == "ok" else record)
                    if trial == last or record.status != "ok":
                        kept = middle(records)
                        self._keep(kept, cell.label, Results(records=(kept,)))
            open_cells = [(cell, records) for cell, records in open_cells if records[-1].status == "ok"]

    def measure_points(self, points: Sequence[Point]) -> None:
        """Measure points of scaling curves, small sizes first; a method that fails is not tried at larger sizes."""
        for workload, group in _grouped(points, lambda point: point.cell.workload):
            with truth_of(workload, {point.cell.quantity for point in group}) as folder:
                for point in group:
                    if not self._is_given_up(point):
                        record = self._measure(point.cell, folder)
                        self._keep(record, point.label, Results(scaling=(point.record(record),)))

    def _measure(self, cell: Cell, folder: str, unit: Turn | None = None, trial: int = 0) -> Record:
        with self._workers.of(cell, trial) as process:
            return measure(cell, process, folder, self._pace, unit)

    def _keep(self, record: Record, label: str, found: Results) -> None:
        self._report(label, record)
        self._results = merge([self._results, found])
        write(self._path, self._results)


def _grouped(items: Sequence[T], key: Callable[[T], str]) -> Iterator[tuple[str, list[T]]]:
    for name, group in itertools.groupby(items, key):
        yield name, list(group)


def check_same(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to add to the results of another machine."""
    for name in SAME:
        if before.get(name) != now[name]:
            expected = f"the results of this machine, whose {name} is {now[name]!r}"
            fix = "Name another file with --results."
            raise ArgumentError.about(
                "results", expected=expected, received=f"{path.name}: {before.get(name)!r}", fix=fix
            )
