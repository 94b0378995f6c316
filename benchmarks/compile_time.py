"""The first call of each engine, without imports, and the calls after which it has paid for itself.

Run as ``python -m benchmarks.compile_time``. Times are CPU seconds of one thread, those of the C++ compiler included:
other programs on the machine matter little. Each cell is a process of its own, in which later calls alternate with the
batch gradient. Compiled code is stored on disk: the first call is measured with an empty cache and in a second process.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from typing import NamedTuple

from benchmarks.process import ROOT

WORKLOADS = (
    "TD(0) MLP 64, B=256",
    "TD(0) MLP 256, B=256",
    "REINFORCE MLP 64, 32x200",
    "DQN Nature CNN, B=32",
    "GRU policy, 32x50",
    "transformer tied, B=16",
)
# Where a first call of an engine begins to import torch's modules; what these import is most of what it needs.
IMPORTS = {
    "eager": "torch.func",
    "traced": "torch._dynamo.repro.after_dynamo, torch.fx.experimental.symbolic_shapes",
    "compiled": "torch._inductor.compile_fx, torch._inductor.fx_passes.joint_graph",
}
SECONDS = 3  # of later calls
CHILD = """
import json, os, time, torch, persample
from benchmarks.alternating import medians
from benchmarks.methods.unit import prepare
from benchmarks.workloads import build
torch.set_num_threads(1)
work = build({workload!r})
unit = prepare(work, "mean").run
def call():
    return persample.per_sample_grads(
        work.loss_fn, work.model, work.batch, persample.ClippedMean(1.0), engine={engine!r}
    )
unit()
moments = [sum(os.times()[:4])]
import {imports}
moments.append(sum(os.times()[:4]))
call()
moments.append(sum(os.times()[:4]))
later = medians({{"unit": unit, "call": call}}, {seconds})
print(json.dumps([moments[1] - moments[0], moments[2] - moments[1], later["call"], later["unit"]]))
"""


class Cell(NamedTuple):
    """What one process measured, in seconds.

    Attributes:
        imports: of imports.
        first: of the first call.
        later: of a later call.
        unit: of the batch gradient.
    """

    imports: float
    first: float
    later: float
    unit: float


def main() -> None:
    """Measure, and print two tables in Markdown."""
    found = {}
    for workload in WORKLOADS:
        with tempfile.TemporaryDirectory() as cache:
            found[workload] = [measured(workload, engine, cache) for engine in (*IMPORTS, "compiled")]
    titles = (*IMPORTS, "compiled, in a second process")
    rows = [[workload, *(f"{cell.first:.2f} s" for cell in cells)] for workload, cells in found.items()]
    imports = (
        sorted(column)[len(found) // 2]
        for column in zip(*([x.imports for x in row] for row in found.values()), strict=True)
    )
    _print(("first call of a clipped mean", *titles), [*rows, ["imports before it", *(f"{x:.2f} s" for x in imports)]])
    rows = []
    for workload, (eager, traced, compiled, _) in found.items():
        ratios = [f"{cell.later / cell.unit:.2f}" for cell in (eager, traced, compiled)]
        calls = [calls_to_pay(traced, eager), calls_to_pay(compiled, traced)]
        rows.append([workload, f"{1e3 * eager.unit:.2f} ms", *ratios, *(f"{x:,.0f}" for x in calls)])
    pays = "calls until traced is ahead of eager", "calls until compiled is ahead of traced"
    _print(("later calls, in batch gradients", "batch gradient", *IMPORTS, *pays), rows)


def measured(workload: str, engine: str, cache: str) -> Cell:
    """Return what a new process measures.

    Args:
        workload: the name of the workload.
        engine: the name of the engine.
        cache: the folder of compiled code.
    """
    where = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": str(ROOT)}
    child = CHILD.format(workload=workload, engine=engine, imports=IMPORTS[engine], seconds=SECONDS)
    done = subprocess.run(
        [sys.executable, "-c", child],
        env={**where, "TORCHINDUCTOR_CACHE_DIR": cache},
        check=True,
        capture_output=True,
        text=True,
    )
    return Cell(*json.loads(done.stdout))


def calls_to_pay(one: Cell, other: Cell) -> float:
    """Return the number of calls after which one engine has taken less time than another, imports included.

    Args:
        one: the engine with the longer first call.
        other: the engine with the longer later calls.

    Returns:
        The number; infinity if later calls do not take less.
    """
    saved = other.later / other.unit - one.later / one.unit
    extra = one.imports + one.first - other.imports - other.first
    return max(1.0, math.ceil(extra / (saved * one.unit))) if saved > 0 else math.inf


def _print(headings: tuple[str, ...], rows: list[list[str]]) -> None:
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    sys.stdout.write("".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n")


if __name__ == "__main__":
    main()
