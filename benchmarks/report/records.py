"""The results of a benchmark run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from persample.errors import ArgumentError

# The name of the method that is the unit of every ratio.
UNIT = "batch gradient"
# Physical limits, timed like methods but not ranked, as they compute no result: writing the bytes of the stacked
# gradients into existing memory, and the matrix products of one batch gradient.
FILL, GEMMS = LIMITS = ("fill_", "batch gradient's GEMMs")

Status = Literal["ok", "wrong", "cannot", "out of memory", "too slow"]
Measure = Literal["time", "memory", "first call"]


class _Checked:
    """Checks literals at construction: records are read from files."""

    def _one_of(self, name: str, allowed: Any) -> None:
        value, names = getattr(self, name), get_args(allowed)
        if value not in names:
            expected = " or ".join(map(repr, names))
            raise ArgumentError.about(name, expected=expected, received=repr(value), fix="Spell it as one of them.")

    def _named(self, *names: str) -> None:
        """Check names that become headings, and ``quantity``, which becomes part of the name of a file."""
        for name in names:
            value = getattr(self, name)
            known = isinstance(value, str) and value.isprintable() and not set(value) & set("<>|$`\\")
            if not known or (name == "quantity" and not value.isidentifier()):
                expected = "a name of letters, digits and _" if name == "quantity" else "a name in one line, no markup"
                raise ArgumentError.about(name, expected=expected, received=repr(value), fix="Correct the file.")


@dataclass(frozen=True)
class Record(_Checked):
    """One quantity of one workload, computed by one method.

    Args:
        workload: name of the workload.
        quantity: what was computed: stack, mean, norms, clipped_mean, gram or variance.
        method: name of the method.
        status: ``"ok"``, or why there is no time.
        reason: in words, where the status is not ``"ok"``.
        median_s: median seconds of the rounds.
        iqr_s: their interquartile range.
        rounds: the number of rounds.
        processes: the number of processes that measured; the record is that of the one with the median ratio, but
            for ``first_call_s``, which is of the first.
        unit_s: median seconds of the batch gradient in the same, alternating rounds.
        ratio: median over the rounds of the method's time divided by the unit's.
        ratio_iqr: interquartile range of these ratios.
        peak_bytes: peak resident bytes of one call in a fresh process, beyond those held before it.
        unit_peak_bytes: the same of the batch gradient.
        first_call_s: seconds of the first call, compilation included.
        error: the largest relative error against the plain loop in float64.
        kernel_s: seconds of one call in which a GPU computed.

    Raises:
        ArgumentError: if the status is not one of the five, or a name holds markup or a path.

    Examples:
        >>> Record("TD(0)", "mean", "Opacus", "cannot", "tied weights").ratio is None
        True
    """

    workload: str
    quantity: str
    method: str
    status: Status
    reason: str = ""
    median_s: float | None = None
    iqr_s: float | None = None
    rounds: int = 0
    processes: int = 1
    unit_s: float | None = None
    ratio: float | None = None
    ratio_iqr: float | None = None
    peak_bytes: int | None = None
    unit_peak_bytes: int | None = None
    first_call_s: float | None = None
    error: float | None = None
    kernel_s: float | None = None

    def __post_init__(self) -> None:
        self._named("workload", "quantity", "method")
        self._one_of("status", Status)

    @property
    def key(self) -> tuple[str, str, str]:
        """The fields that identify the record within a run."""
        return self.workload, self.quantity, self.method

    @property
    def words(self) -> str:
        """What was found, in one line."""
        if self.status != "ok" or self.median_s is None:
            return f"{self.status}: {self.reason}"
        memory = "" if self.peak_bytes is None else f", {self.peak_bytes / 2**20:.1f} MiB"
        ratio = "" if self.ratio is None else f" = {self.ratio:.2f} × the {UNIT}"
        return f"{self.median_s * 1e3:.3f} ms{ratio}{memory}"


@dataclass(frozen=True)
class ScalingRecord(_Checked):
    """One point of a scaling curve: the TD(0) MLP with two hidden layers of one width, at one batch size.

    Args:
        method: name of the method, or of one of the LIMITS.
        quantity: what was computed.
        batch_size: B.
        hidden: width of the hidden layers.
        status: ``"ok"``, or why there is no time.
        reason: in words, where the status is not ``"ok"``.
        median_s: median seconds.
        peak_bytes: peak resident bytes, beyond those held before.

    Raises:
        ArgumentError: if the status is not one of the five, or a name holds markup or a path.

    Examples:
        >>> ScalingRecord("fill_", "stack", 256, 64, "ok", median_s=1e-3).key
        ('fill_', 'stack', 256, 64)
    """

    method: str
    quantity: str
    batch_size: int
    hidden: int
    status: Status
    reason: str = ""
    median_s: float | None = None
    peak_bytes: int | None = None

    def __post_init__(self) -> None:
        self._named("quantity", "method")
        self._one_of("status", Status)

    @property
    def key(self) -> tuple[str, str, int, int]:
        """The fields that identify the point within a run."""
        return self.method, self.quantity, self.batch_size, self.hidden


@dataclass(frozen=True)
class Target(_Checked):
    """A limit that the project has set for one method.

    Args:
        workload: name of the workload.
        quantity: what is computed.
        method: name of the method.
        limit: the largest value that meets the target: a ratio, or seconds where ``relative_to`` is None.
        issue: the number of the issue that set it.
        measure: ``"time"``, ``"memory"`` (of a call at its peak) or ``"first call"`` (its time).
        relative_to: the method whose measure on the same workload is the unit, or None for seconds.
        relative_quantity: the quantity that ``relative_to`` computes; None: the same quantity.

    Raises:
        ArgumentError: if the measure is not one of the three, or a name holds markup or a path.

    Examples:
        >>> Target("TD(0) MLP 256, B=256", "clipped_mean", "persample compiled", 0.95, issue=4).relative_to
        'batch gradient'
    """

    workload: str
    quantity: str
    method: str
    limit: float
    issue: int
    measure: Measure = "time"
    relative_to: str | None = UNIT
    relative_quantity: str | None = None

    def __post_init__(self) -> None:
        self._named("workload", "quantity", "method")
        self._one_of("measure", Measure)


@dataclass(frozen=True)
class Results:
    """The results of a run, its environment, and its targets.

    Args:
        environment: versions, processor, threads, date, revision.
        records: one per workload, quantity and method, in the order of the tables.
        scaling: the points of the scaling curves.
        targets: the limits to compare with.

    Examples:
        >>> Results({"torch": "2.13"}).records
        ()
    """

    environment: dict[str, Any] = field(default_factory=dict)
    records: tuple[Record, ...] = ()
    scaling: tuple[ScalingRecord, ...] = ()
    targets: tuple[Target, ...] = ()
