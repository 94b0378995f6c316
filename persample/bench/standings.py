"""Who is ahead where: each of our methods against the best of the others, for every workload and quantity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from persample.bench.records import LIMITS, Record, Results
from persample.errors import ArgumentError

Compared = Literal["time", "memory"]
Verdict = Literal["ahead", "even", "behind", "alone"]
Notes = Mapping[tuple[str, str, str], str]

# What is closer than this is even; resident memory is not known better than to some pages.
MARGIN, _BYTES = 0.05, 2**20


@dataclass(frozen=True)
class Standing:
    """Our best method beside the best of the others, for one quantity of one workload.

    Args:
        workload: name of the workload.
        quantity: what was computed.
        measure: what is compared: ``"time"`` or ``"memory"``.
        ours: our best record, or our first one where none can.
        peer: the best of the others, None where none can.
    """

    workload: str
    quantity: str
    measure: Compared
    ours: Record
    peer: Record | None

    @property
    def key(self) -> tuple[str, str, str]:
        """What a note names it by."""
        return self.workload, self.quantity, self.measure

    @property
    def factor(self) -> float:
        """Ours by the other's: above 1 we need more; ∞ where we have nothing."""
        ours, peer = (None if record is None else cost(record, self.measure) for record in (self.ours, self.peer))
        if ours is None or peer is None:
            return math.inf if ours is None else 0.0
        return ours / peer if peer else math.inf

    @property
    def verdict(self) -> Verdict:
        """Where we stand."""
        ours, peer = (None if record is None else cost(record, self.measure) for record in (self.ours, self.peer))
        if ours is None or peer is None:
            return "behind" if ours is None else "alone"
        if abs(ours - peer) <= MARGIN * peer or (self.measure == "memory" and abs(ours - peer) < _BYTES):
            return "even"
        return "ahead" if ours < peer else "behind"


def is_ours(method: str) -> bool:
    """Tell our own methods from the others.

    Args:
        method: its name.

    Returns:
        Whether it is ours.

    Examples:
        >>> is_ours("persample compiled"), is_ours("Opacus hooks")
        (True, False)
    """
    return method.startswith("persample")


def cost(record: Record, measure: Compared) -> float | None:
    """Return what methods are ranked by.

    Args:
        record: of one method.
        measure: ``"time"``: the ratio to the batch gradient; ``"memory"``: bytes.

    Returns:
        The number, None where there is none.
    """
    if record.status != "ok":
        return None
    return record.ratio if measure == "time" else record.peak_bytes


def standings(results: Results, measure: Compared, method: str | None = None) -> list[Standing]:
    """Compare us with the others.

    Args:
        results: of a run.
        measure: what is compared.
        method: which of ours takes part; None: all of them, and the best counts.

    Returns:
        One for each workload and quantity that we took part in and somebody can do; for memory, that both know.
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
    """List where somebody else is ahead of all our methods.

    Args:
        results: of a run.

    Returns:
        In time, then in memory, the worst first.
    """
    behind = [[s for s in standings(results, measure) if s.verdict == "behind"] for measure in ("time", "memory")]
    return [standing for group in behind for standing in sorted(group, key=lambda s: -s.factor)]


def check_notes(lost: Iterable[Standing], notes: Notes) -> None:
    """See that a line says why, wherever we lose, and nowhere else.

    Args:
        lost: where we lose.
        notes: why, by (workload, quantity, measure).

    Raises:
        ArgumentError: if a note is missing, or one is left of a row that is no longer lost.
    """
    rows = {standing.key: standing for standing in lost}
    missing = "".join(f'\n    {key}: "",  # {_summary(rows[key])}' for key in rows if not notes.get(key))
    unused = "".join(f"\n    {key}" for key in notes if key not in rows)
    if missing or unused:
        received = f"none for{missing}\n" * bool(missing) + f"one too many for{unused}\n" * bool(unused)
        fix = "Say why in benchmarks/notes.py, and take out what no longer holds."
        raise ArgumentError.about("notes", expected="a line on every row that is lost", received=received, fix=fix)


def _summary(standing: Standing) -> str:
    peer = standing.peer.method if standing.peer else "others"
    return f"{standing.ours.method} needs {standing.factor:.2f} × the {standing.measure} of {peer}"
