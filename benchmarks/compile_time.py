"""The time of the first call on each engine, without imports, and the time of these imports.

Run as ``python -m benchmarks.compile_time``. Compiled code is stored on disk: its first call is measured with an empty
cache, and in a second process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

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
# Their titles and engines, in this order: what the third stores, the fourth reads.
COLUMNS = (
    ("eager", "eager"),
    ("traced", "traced"),
    ("compiled, empty cache", "compiled"),
    ("compiled, in a second process", "compiled"),
)
CHILD = """
import time, torch, persample
from benchmarks.workloads import build
work = build({workload!r})
start = time.perf_counter()
import {imports}
imported = time.perf_counter()
persample.per_sample_grads(work.loss_fn, work.model, work.batch, persample.ClippedMean(1.0), engine={engine!r})
print(imported - start, time.perf_counter() - imported)
"""


def main() -> None:
    """Measure, and print a table in Markdown."""
    imports = []
    sys.stdout.write(f"| clipped mean of | {' | '.join(title for title, _ in COLUMNS)} |\n")
    sys.stdout.write(f"| --- |{' ---: |' * len(COLUMNS)}\n")
    for workload in WORKLOADS:
        with tempfile.TemporaryDirectory() as cache:
            found = [_seconds(workload, engine, cache) for _, engine in COLUMNS]
        imports.append([imported for imported, _ in found])
        sys.stdout.write(f"| {workload} | {' | '.join(f'{first:.2f} s' for _, first in found)} |\n")
    medians = (sorted(column)[len(column) // 2] for column in zip(*imports, strict=True))
    sys.stdout.write(f"| imports, median | {' | '.join(f'{x:.2f} s' for x in medians)} |\n")


def _seconds(workload: str, engine: str, cache: str) -> list[float]:
    """Return the seconds of imports and of the first call, in a process of their own."""
    where = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
    child = [sys.executable, "-c", CHILD.format(workload=workload, engine=engine, imports=IMPORTS[engine])]
    done = subprocess.run(child, env=where, check=True, capture_output=True, text=True)
    return [float(text) for text in done.stdout.split()]


if __name__ == "__main__":
    main()
