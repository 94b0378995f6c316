"""The time of the first compiled call, without imports: with an empty cache on disk, and in a second process.

Run as ``python -m benchmarks.compile_time``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from benchmarks.process import ROOT

CHILD = """
import time, torch, torch._inductor.compile_fx, torch._inductor.fx_passes.joint_graph
from benchmarks.workloads import build
from persample import ClippedMean, per_sample_grads
work = build({workload!r})
start = time.perf_counter()
per_sample_grads(work.loss_fn, work.model, work.batch, ClippedMean(1.0), engine="compiled")
print(time.perf_counter() - start)
"""


def main() -> None:
    for workload in ("TD(0) MLP 256, B=256", "REINFORCE MLP 64, 32x200", "DQN Nature CNN, B=32", "GRU policy, 32x50"):
        with tempfile.TemporaryDirectory() as cache:
            where = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
            for state in ("empty cache", "second process"):
                child = [sys.executable, "-c", CHILD.format(workload=workload)]
                seconds = subprocess.run(child, env=where, check=True, capture_output=True, text=True).stdout
                sys.stdout.write(f"{workload}, {state}: {float(seconds):.1f} s\n")


if __name__ == "__main__":
    main()
