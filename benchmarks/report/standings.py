"""Ranks our methods against the best of the others, for every workload and quantity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.report.records import LIMITS, Record, Results
from persample.errors import ArgumentError

Compared = Literal["time", "memory"]
Verdict = Literal["ahead", "even", "behind", "alone"]
Notes = Mapping[tuple[str, str, str], str]

# Relative and absolute difference below which two methods are even: resident memory is measured in whole pages.
MARGIN, _BYTES = 0.05, 2**20


@dataclass(frozen=True)
class Standing:
    """Our best method beside the best of the others, for one quantity of one workload.

    Args:
        workload: name of the workload.
        quantity: what was computed.
        measure: ``"time"`` or ``"memory"``.
        ours: the best of our records; our first record where no method of ours succeeded.
        peer: the best of the others, None where no other method succeeded.
    """

    workload: str
    quantity: str
    measure: Compared
    ours: Record
    peer: Record | None

    @property
    def key(self) -> tuple[str, str, str]:
        """The key of its note."""
        return self.workload, self.quantity, self.measure

    @property
    def _costs(self) -> tuple[float | None, float | None]:
        return cost(self.ours, self.measure), cost(self.peer, self.measure) if self.peer else None

    @property
    def factor(self) -> float:
        """Our cost divided by the peer's: above 1 we need more, ∞ where no method of ours succeeded."""
        ours, peer = self._costs
        if ours is None or peer is None:
            return math.inf if ours is None else 0.0
        return ours / peer if peer else math.inf

    @property
    def verdict(self) -> Verdict:
        """Whether we are ahead, even, behind, or alone in succeeding."""
        ours, peer = self._costs
        if ours is None or peer is None:
            return "behind" if ours is None else "alone"
        if abs(ours - peer) <= MARGIN * peer or (self.measure == "memory" and abs(ours - peer) < _BYTES):
            return "even"
        return "ahead" if ours < peer else "behind"


def is_ours(method: str) -> bool:
    """Return whether a method is one of ours.

    Args:
        method: the name of the method.

    Returns:
        Whether the name is one of persample's.

    Examples:
        >>> is_ours("persample compiled"), is_ours("Opacus hooks")
        (True, False)
    """
    return method.startswith("persample")


def cost(record: Record, measure: Compared) -> float | None:
    """Return the number that ranks methods.

    Args:
        record: of one method.
        measure: ``"time"``: the ratio to the batch gradient; ``"memory"``: bytes.

    Returns:
        The number; None if the method failed or the number is unknown.
    """
    if record.status != "ok":
        return None
    return record.ratio if measure == "time" else record.peak_bytes


def standings(results: Results, measure: Compared, method: str | None = None) -> list[Standing]:
    """Compare our methods with the others.

    Args:
        results: of a run.
        measure: what is compared.
        method: the one of our methods to compare; None: the best of all of them.

    Returns:
        One standing per workload and quantity that we tried and any method succeeded in. For memory, only pairs of
        which both amounts are known.
    """
    cells: dict[tuple[str, str], list[Record]] = {}
    for record in results.records:
        cells.setdefault((record.workload, record.quantity), []).append(record)
    found = []
    for (workload, quantity), records in cells.items():
        ours = [record for record in records if is_ours(record.method) and method in {None, record.method}]
        peer = _best((r for r in records if not is_ours(r.method) and r.method not in LIMITS), measure)
        best = _best(ours, measure)
        if (best or peer) and ours and (measure == "time" or (best and peer)):
            found.append(Standing(workload, quantity, measure, best or ours[0], peer))
    return found


def _best(records: Iterable[Record], measure: Compared) -> Record | None:
    costs = [(amount, record) for record in records if (amount := cost(record, measure)) is not None]
    return min(costs, key=lambda pair: pair[0], default=(None, None))[1]


def losses(results: Results) -> list[Standing]:
    """List the standings in which we are behind.

    Args:
        results: of a run.

    Returns:
        Losses in time, then losses in memory, the largest factor first.
    """
    behind = [[s for s in standings(results, measure) if s.verdict == "behind"] for measure in ("time", "memory")]
    return [standing for group in behind for standing in sorted(group, key=lambda s: -s.factor)]


def check_notes(lost: Iterable[Standing], notes: Notes) -> None:
    """Check that every loss has a note, and every note a loss.

    Args:
        lost: our losses.
        notes: the reasons, by (workload, quantity, measure).

    Raises:
        ArgumentError: if a loss has no note, or a note has no loss.
    """
    rows = {standing.key: standing for standing in lost}
    missing = "".join(f'\n    {key}: "",  # {_summary(rows[key])}' for key in rows if not notes.get(key))
    unused = "".join(f"\n    {key}" for key in notes if key not in rows)
    if missing or unused:
        received = f"none for{missing}\n" * bool(missing) + f"one too many for{unused}\n" * bool(unused)
        fix = "Say why in benchmarks/notes.py, and take out what no longer holds."
        raise ArgumentError.about("notes", expected="a line on every row that is lost", received=received, fix=fix)


def _summary(standing: Standing) -> str:
    ours, peer = standing.ours, standing.peer.method if standing.peer else "others"
    if math.isinf(standing.factor):
        return f"{ours.method}: {ours.status}; {peer} can"
    return f"{ours.method} needs {standing.factor:.2f} × the {standing.measure} of {peer}"
