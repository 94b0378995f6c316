"""What was demanded beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from persample.bench.records import UNIT, Measure, Record, Results, Target


@dataclass(frozen=True)
class Outcome:
    """A demanded number and the measured one.

    Args:
        target: what was demanded.
        value: what was measured, in the target's unit; None where nothing was.
        reason: why there is nothing.
    """

    target: Target
    value: float | None
    reason: str = ""

    @property
    def met(self) -> bool:
        """Whether the demand is met; what was not measured does not count."""
        return self.value is not None and self.value <= self.target.limit


def outcomes(results: Results) -> list[Outcome]:
    """Look up what was measured for every target.

    Args:
        results: of a run.

    Returns:
        One outcome per target, in their order.

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
    if target.relative_to == UNIT:  # in the same rounds
        return Record(*record.key[:2], UNIT, "ok", ratio=1.0, peak_bytes=record.unit_peak_bytes)
    assert target.relative_to is not None
    return records.get((target.workload, target.relative_quantity or target.quantity, target.relative_to))


def _relative(record: Record, measure: Measure) -> float | None:
    """Return what quotients are taken of; for time that is the ratio to the unit, measured in alternating rounds."""
    return {"time": record.ratio, "memory": record.peak_bytes, "first call": record.first_call_s}[measure]


def _why(record: Record | None, method: str) -> str:
    return f"{method}: {record.status}: {record.reason}" if record else f"{method}: not in this run"
