"""Many random programs, as ``make fuzz`` runs them: counts as they come, and every finding as small as it gets.

``python tests/fuzz.py eager 0 5000`` takes the seeds 0 to 4999; after an interrupt, go on with the seed that it names.
"""

from __future__ import annotations

import collections
import sys

from random_outcomes import outcomes
from random_shrinking import smallest

EVERY = {"eager": 100, "traced": 50, "compiled": 10}  # seeds between two lines of counts


def fuzz(engine: str, start: int, stop: int) -> int:
    """Run the programs of some seeds; return how many of them are findings."""
    counts: collections.Counter[str] = collections.Counter()
    for first in range(start, stop, EVERY[engine]):
        end = min(first + EVERY[engine], stop)
        for outcome in outcomes(engine, first, end):
            counts[outcome.kind] += 1
            if outcome.kind == "finding":
                print(f"seed {outcome.seed}: {outcome.why}\n{smallest(outcome, engine)}", flush=True)
        print(f"{engine}: seeds {start} to {end - 1}: {dict(counts)}; next {end}", flush=True)
    return counts["finding"]


if __name__ == "__main__":
    sys.exit(fuzz(sys.argv[1], *map(int, sys.argv[2:])) > 0)
