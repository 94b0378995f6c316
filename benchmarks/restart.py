"""How much of a cold start the compiled engine saves in a second process: ``python benchmarks/restart.py``."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

FIRST_CALL = """
import time
import torch
from torch import nn
import persample as ps

torch.manual_seed(0)
value = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))


def loss(value, s_tm1, r_t, s_t):
    return (r_t + 0.99 * value(s_t).detach() - value(s_tm1)).square().sum()


batch = torch.randn(256, 8), torch.randn(256), torch.randn(256, 8)
start = time.perf_counter()
ps.per_sample_grads(loss, value, batch, ps.ClippedMean(1.0), engine="compiled")
print(time.perf_counter() - start)
"""


def first_call(cache: str) -> float:
    """Return the seconds of the first call in a process of its own, imports excluded."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    return float(subprocess.run([sys.executable, "-c", FIRST_CALL], env=env, check=True, stdout=-1, text=True).stdout)


def main(rounds: int = 3) -> None:
    """Print the medians over some fresh cache folders."""
    cold, warm = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(first_call(cache))
            warm.append(first_call(cache))
    one, other = statistics.median(cold), statistics.median(warm)
    print(f"empty cache {one:.1f} s, second process {other:.1f} s: {other / one:.2f} of it (to reach: < 0.5)")  # noqa: T201


if __name__ == "__main__":
    main()
