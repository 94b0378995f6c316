"""The comparison: time, memory and result of each method beside those of the naive loop; as a table, and as JSON."""

from __future__ import annotations

import errno
import json
import stat
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from persample import Mean, Norm, per_sample_grads
from persample.cli.cases import FUSED, LOOP, METHODS, Case, Settings, fused_by_loop, methods
from persample.cli.measure import environment, peak_memory, relative_difference, time_rounds
from persample.errors import ArgumentError
from persample.inputs import Engine

# The largest relative difference that float32 rounding explains.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Row:
    """One method on one loss.

    Args:
        loss: the name of the loss.
        method: one of METHODS.
        seconds: the seconds of every round.
        peak_bytes: the peak bytes of torch's allocator in one call.
        speedup: the loop's median time divided by this method's.
        difference: the largest relative difference from the loop's update.
    """

    loss: str
    method: str
    seconds: tuple[float, ...]
    peak_bytes: int
    speedup: float
    difference: float

    @property
    def median(self) -> float:
        """Median seconds of the rounds."""
        return statistics.median(self.seconds)

    @property
    def agrees(self) -> bool:
        """Whether the update equals the loop's up to rounding."""
        return self.difference < TOLERANCE


@dataclass(frozen=True)
class Comparison:
    """All methods on one loss.

    Args:
        loss: the name of the loss.
        unit: the word for one sample.
        samples: number of samples B.
        parameters: number of parameters P.
        rows: one per method, in the order of METHODS.
        norms: Euclidean norms of the B per-sample gradients.
    """

    loss: str
    unit: str
    samples: int
    parameters: int
    rows: tuple[Row, ...]
    norms: tuple[float, ...]


def compare(case: Case, engine: Engine, rounds: int, progress: Callable[[int], object]) -> Comparison:
    """Measure every method on the averaged gradient of one loss.

    Args:
        case: the loss and its batch.
        engine: the engine of persample.
        rounds: how many times each method is timed.
        progress: called with the number of new measured calls, ``calls(rounds)`` in total.
    """
    calls = methods(case, engine)
    seconds = time_rounds(calls, rounds, progress=progress)
    peaks = {}
    for name, call in calls.items():
        peaks[name] = peak_memory(call)
        progress(1)
    updates = {name: call() for name, call in calls.items()}
    loop_median = statistics.median(seconds[LOOP])
    rows = tuple(
        Row(
            case.name,
            name,
            tuple(seconds[name]),
            peaks[name],
            loop_median / statistics.median(seconds[name]),
            relative_difference(updates[name], fused_by_loop(case) if name == FUSED else updates[LOOP]),
        )
        for name in METHODS
    )
    both = per_sample_grads(case.loss_fn, case.params, case.batch, {"update": Mean(), "norms": Norm()}, engine=engine)
    return Comparison(case.name, case.unit, case.size, case.parameters, rows, tuple(both["norms"].tolist()))


def calls(rounds: int) -> int:
    """Return the number of measured calls of one comparison: a round more than are timed."""
    return len(METHODS) * (rounds + 1)


def table(comparisons: Sequence[Comparison]) -> Table:
    """Return one table with all rows."""
    result = Table(
        caption="time: median of the rounds; memory: peak bytes that torch's allocator holds beyond what it held "
        "before;\nlargest difference: max over parameters of max|update − loop's| / max|loop's|;\n"
        "fused: mean, mean of gradients clipped to norm 1, and norms, from one pass",
        caption_justify="left",
    )
    for heading in ("loss", "method"):
        result.add_column(heading)
    for heading in ("time", "peak memory", "speed-up", "largest difference"):
        result.add_column(heading, justify="right")
    for comparison in comparisons:
        for row in comparison.rows:
            verdict = f"{row.difference:.1e}" if row.agrees else f"[bold red]{row.difference:.1e} > {TOLERANCE:g}[/]"
            memory = f"{row.peak_bytes / 2**20:.2f} MiB"
            result.add_row(row.loss, row.method, f"{1e3 * row.median:.2f} ms", memory, f"{row.speedup:.1f} ×", verdict)
        result.add_section()
    return result


def notes(comparisons: Sequence[Comparison]) -> list[str]:
    """Return one line on the batches, and one per loss whose gradients are all zero: its differences mean nothing."""
    batches = ", ".join(f"{c.loss}: {c.samples} {c.unit}s, {c.parameters} parameters" for c in comparisons)
    zeros = [c.loss for c in comparisons if not any(c.norms)]
    return [
        batches,
        *(f"{loss}: every gradient is zero (no reward was received); differences mean nothing." for loss in zeros),
    ]


def save_report(settings: Settings, comparisons: Sequence[Comparison], path: Path) -> None:
    """Write all measurements as JSON, with settings and environment."""
    report = {
        "settings": asdict(settings),
        "environment": environment(),
        "comparisons": [_record(comparison) for comparison in comparisons],
    }
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _record(comparison: Comparison) -> dict[str, Any]:
    record = asdict(comparison)
    record["rows"] = [asdict(row) | {"median_seconds": row.median} for row in comparison.rows]
    norms = record.pop("norms")
    record["gradient_norms"] = {
        "min": min(norms),
        "median": statistics.median(norms),
        "mean": statistics.fmean(norms),
        "max": max(norms),
    }
    return record


def writable(directory: Path, *names: str) -> Path:
    """Make a directory, check that files with these names can be written to it, and return it.

    Raises:
        ArgumentError: if the directory cannot be made or written to, or has a link, a pipe, … in the place of a file.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
        for name in names:
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(mode := (directory / name).lstat().st_mode):
                    kind = "a directory" if stat.S_ISDIR(mode) else "no plain file"
                    raise FileExistsError(errno.EEXIST, f"{name} is {kind}")
    except (OSError, ValueError) as error:
        fix = "Choose another one."
        reason = getattr(error, "strerror", error)  # a zero byte is a ValueError
        expected, received = "a directory that can be written to", f"{str(directory)!r} ({reason})"
        raise ArgumentError.about("--output", expected=expected, received=received, fix=fix) from error
    return directory
