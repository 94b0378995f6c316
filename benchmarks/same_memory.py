"""The time of stacked gradients written into ``out``, beside ``fill_`` over the same bytes.

Memory of another process may be twice as fast, so both alternate in one process.
Run as ``python -m benchmarks.same_memory``.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from benchmarks.workloads import build
from persample import Stack, per_sample_grads

ROUNDS = 200


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    work = build("TD(0) MLP 256, B=256")
    for engine in ("compiled", "traced", "eager"):
        call = work.loss_fn, work.model, work.batch, Stack()
        out = per_sample_grads(*call, engine=engine)
        turns: dict[str, Callable[[], object]] = {
            "out=": lambda out=out, engine=engine, call=call: per_sample_grads(*call, engine=engine, out=out),
            "fill_": lambda out=out: [rows.fill_(1.0) for rows in out.values()],
        }
        rounds = [{name: _seconds(turn) for name, turn in turns.items()} for _ in range(ROUNDS)][ROUNDS // 10 :]
        ours, fill = (statistics.median(x[name] for x in rounds) for name in turns)
        sys.stdout.write(f"{engine}: {1e3 * ours:.2f} ms, fill_ {1e3 * fill:.2f} ms: {ours / fill:.2f}\n")


if __name__ == "__main__":
    main()
