"""What ``accumulate`` takes and sends on several processes of this machine, for docs/scaling.md.

``torchrun --standalone --nproc-per-node 2 -m benchmarks.ranks`` prints a line for each reduction: the seconds of one
pass over 64 batches in all, bytes and time of each collective, and the bytes that came through the loopback device.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.nn import functional as F

from benchmarks import models
from persample import Mean, Norm, Variance, accumulate

BATCHES, SIZE, ROUNDS = 64, 256, 3
REDUCTIONS = {"Mean": Mean(), "Variance": Variance(), "Norm": Norm()}


def loss(model, x, y):
    return F.cross_entropy(model(x), y)


def received() -> int:
    """Bytes that have come through the loopback device."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


def watched(calls):
    """An all-reduce that notes its bytes and seconds; the two numbers of each batch pass unseen."""
    original = dist.all_reduce

    def all_reduce(x, **options):
        if options.get("async_op"):
            return original(x, **options)
        start = time.perf_counter()
        original(x, **options)
        calls.append((x.nbytes, time.perf_counter() - start))
        return None

    return all_reduce


def measured(name: str, world: int) -> str:
    torch.manual_seed(0)
    model = models.mlp(256, 1024, 1024, 10)
    batch = torch.randn(SIZE, 256), torch.randint(10, (SIZE,))
    calls, seconds, sent = [], [], []
    dist.all_reduce, original = watched(calls), dist.all_reduce
    for _ in range(ROUNDS):
        calls.clear()
        dist.barrier()
        start, before = time.perf_counter(), received()
        accumulate(loss, model, [batch] * (BATCHES // world), REDUCTIONS[name], group=dist.group.WORLD)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        sent.append(received() - before)
    dist.all_reduce = original
    collectives = ", ".join(f"{size:,} bytes in {1e3 * taken:.0f} ms" for size, taken in calls) or "no all-reduce"
    return f"{world} processes, {name}: {median(seconds):.2f} s; {collectives}; {median(sent):,} bytes through lo"


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in REDUCTIONS:
        line = measured(name, dist.get_world_size())
        if not dist.get_rank():
            print(line, flush=True)
    dist.destroy_process_group()
