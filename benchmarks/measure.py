"""Measures one cell: a method and the unit alternate, so that their ratio holds on a noisy machine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.cells import Cell
from benchmarks.process import FailedError, Process
from benchmarks.report.records import Record

# The resident bytes that a method may add to its process.
BUDGET = 4 * 2**30
# Allocations fail beyond this limit. It exceeds BUDGET, as memory that is allocated but never touched does not count.
LIMIT = 2 * BUDGET
# Shorter calls follow one untimed call, as the other worker has evicted the caches.
_WARMED_UP = 0.1


@dataclass(frozen=True)
class Pace:
    """The duration of measurements.

    Args:
        cell_s: seconds of all rounds together, unless the minimum number of rounds takes longer.
        turn_s: seconds of one turn; short calls are repeated until they fill it.
        rounds: the minimum and the maximum number of rounds.
        processes: the number of fresh processes that measure a cell, one after the other; the middle one counts.
        first_timeout_s: the time limit of set-up, compilation, and two calls.
        calls_timeout_s: the time limit of the minimum number of rounds.
    """

    cell_s: float = 1.0
    turn_s: float = 0.02
    rounds: tuple[int, int] = (5, 50)
    processes: int = 1
    first_timeout_s: float = 300.0
    calls_timeout_s: float = 40.0


SWEEP = Pace(cell_s=0.5, rounds=(5, 25), processes=3, first_timeout_s=180.0, calls_timeout_s=20.0)
LARGE = Pace(cell_s=20.0, first_timeout_s=600.0, calls_timeout_s=120.0)
QUICK = Pace(cell_s=0.1, turn_s=0.002, rounds=(3, 5))


@dataclass(frozen=True)
class Turn:
    """A method that is set up in its worker.

    Args:
        worker: the process.
        pace: how long to measure.
        first_call_s: seconds of the first call, compilation included.
        call_s: approximate seconds of a call.
        error: the largest relative error of its result.
    """

    worker: Process
    pace: Pace
    first_call_s: float
    call_s: float
    error: float | None

    @property
    def times(self) -> int:
        """The number of calls in a turn."""
        return math.ceil(self.pace.turn_s / max(self.call_s, 1e-5))

    @property
    def seconds(self) -> float:
        """Approximate seconds of a turn."""
        return self.call_s * (self.times + self._warm_up)

    @property
    def _warm_up(self) -> bool:
        return self.call_s < _WARMED_UP

    def time(self) -> float:
        """Take a turn, and return the median seconds of its calls."""
        facts = self.worker.ask("time", self.pace.calls_timeout_s, times=self.times, warm_up=self._warm_up)
        return statistics.median(facts["seconds"])

    def peak_bytes(self) -> int | None:
        """Return the peak bytes of one call."""
        return self.worker.ask("memory", self.pace.calls_timeout_s)["peak_bytes"]


def set_up(cell: Cell, worker: Process, folder: str, pace: Pace) -> Turn:
    """Let a worker set up a method and check its result; raises ``FailedError`` if the worker fails or is too slow."""
    asked = {"method": cell.method.name, "workload": cell.workload, "quantity": cell.quantity}
    facts = worker.ask("prepare", pace.first_timeout_s, **asked, folder=folder, limit=LIMIT)
    turn = Turn(worker, pace, facts["first_call_s"], facts["call_s"], facts.get("error"))
    if turn.seconds * pace.rounds[0] > pace.calls_timeout_s:
        raise FailedError("too slow", f"one call takes {turn.call_s:.0f} s")
    return turn


def measure(cell: Cell, worker: Process, folder: str, pace: Pace, unit: Turn | None = None) -> Record:
    """Measure a cell, alternating with the unit if one is given."""
    try:
        turn = set_up(cell, worker, folder, pace)
        own, others = _take_turns(turn, unit)
        peak = turn.peak_bytes()
    except FailedError as failed:
        return Record(*cell.key, failed.status, failed.reason, error=failed.error)
    if peak is not None and peak > BUDGET:
        reason = f"needs {peak / 2**30:.1f} GiB, more than {BUDGET / 2**30:.0f}"
        return Record(*cell.key, "out of memory", reason, peak_bytes=peak, error=turn.error)
    record = Record(
        *cell.key,
        "ok",
        median_s=statistics.median(own),
        iqr_s=_iqr(own),
        rounds=len(own),
        peak_bytes=peak,
        first_call_s=turn.first_call_s,
        error=turn.error,
    )
    if unit is None:
        return record
    ratios = [mine / other for mine, other in zip(own, others, strict=True)]
    return replace(record, unit_s=statistics.median(others), ratio=statistics.median(ratios), ratio_iqr=_iqr(ratios))


def middle(records: Sequence[Record]) -> Record:
    """Return the record with the median ratio of several processes that measured the same cell, one after the other.

    Args:
        records: their records; after a failure there are no more. The first process compiled, if any did.
    """
    if records[-1].status != "ok":
        return records[-1]
    chosen = sorted(records, key=lambda record: record.ratio or 0.0)[len(records) // 2]
    return replace(chosen, processes=len(records), first_call_s=records[0].first_call_s)


def _take_turns(turn: Turn, unit: Turn | None) -> tuple[list[float], list[float]]:
    turns = [turn] if unit is None else [turn, unit]
    fewest, most = turn.pace.rounds
    rounds = min(max(round(turn.pace.cell_s / sum(one.seconds for one in turns)), fewest), most)
    seconds = [[one.time() for one in turns] for _ in range(rounds)]
    return [row[0] for row in seconds], [row[-1] for row in seconds]


def _iqr(values: Sequence[float]) -> float:
    low, high = np.quantile(values, [0.25, 0.75])
    return float(high - low)
