"""Targets beside measured values."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.report.records import UNIT, Measure, Record, Results, Target


@dataclass(frozen=True)
class Outcome:
    """A target and the measured value.

    Args:
        target: the target.
        value: the measured value in the target's unit; None if there is none.
        reason: why there is no value.
    """

    target: Target
    value: float | None
    reason: str = ""

    @property
    def met(self) -> bool:
        """Whether the value is within the limit; False without a value."""
        return self.value is not None and self.value <= self.target.limit


def outcomes(results: Results) -> list[Outcome]:
    """Look up the measured value of every target.

    Args:
        results: of a run.

    Returns:
        One outcome per target, in the order of the targets.

    Examples:
        >>> target = Target("TD(0)", "norms", "persample eager", 2.5, issue=3)
        >>> record = Record("TD(0)", "norms", "persample eager", "ok", ratio=1.5)
        >>> outcome, = outcomes(Results(records=(record,), targets=(target,)))
        >>> outcome.value, outcome.met
        (1.5, True)
    """
    records = {record.key: record for record in results.records}
    return [_outcome(records, target) for target in results.targets]


def _outcome(records: dict[tuple[str, str, str], Record], target: Target) -> Outcome:
    record = records.get((target.workload, target.quantity, target.method))
    if record is None or record.status != "ok":
        return Outcome(target, None, _why(record, target.method))
    if target.relative_to is None:
        absolute = {"time": record.median_s, "memory": record.peak_bytes, "first call": record.first_call_s}
        value = absolute[target.measure]
        return Outcome(target, value, "" if value is not None else "not measured")
    other = _other(records, target, record)
    if other is None or other.status != "ok":
        return Outcome(target, None, _why(other, target.relative_to))
    value, unit = (_relative(each, target.measure) for each in (record, other))
    return Outcome(target, value / unit) if value and unit else Outcome(target, None, "not measured")


def _other(records: dict[tuple[str, str, str], Record], target: Target, record: Record) -> Record | None:
    if target.relative_to == UNIT:  # measured in the same rounds as ``record``
        return Record(*record.key[:2], UNIT, "ok", ratio=1.0, peak_bytes=record.unit_peak_bytes)
    assert target.relative_to is not None
    return records.get((target.workload, target.relative_quantity or target.quantity, target.relative_to))


def _relative(record: Record, measure: Measure) -> float | None:
    """Return the value that quotients use: for time, the ratio to the batch gradient of the same rounds."""
    return {"time": record.ratio, "memory": record.peak_bytes, "first call": record.first_call_s}[measure]


def _why(record: Record | None, method: str) -> str:
    return f"{method}: {record.status}: {record.reason}" if record else f"{method}: not in this run"
