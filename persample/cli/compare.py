"""The comparison: time, memory and result of each method, beside those of the naive loop."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from persample import Mean, Norm, per_sample_grads
from persample.cli.cases import FUSED, LOOP, METHODS, Case, fused_by_loop, methods
from persample.cli.measure import peak_memory, relative_difference, time_rounds
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
