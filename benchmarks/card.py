"""A process that measures one row after another on one device: ``python -m benchmarks.card DEVICE``.

It answers requests in lines of JSON as ``benchmarks.worker`` does. What it compares with is the plain loop over the
samples on the same device and in the same dtype, so that large models need no second pass in float64.
"""

from __future__ import annotations

import functools
import gc
import statistics
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import benchmarks.older_torch  # noqa: F401 - before persample
from benchmarks import stopwatch
from benchmarks.machine import run_environment
from benchmarks.methods import FILES, methods_of
from benchmarks.methods.method import CannotError, Method
from benchmarks.oracle import reference
from benchmarks.worker import Request, answer_standard_input
from benchmarks.workload import Workload
from benchmarks.workloads import build
from persample import clear_cache

# The fewest and the most timed calls of a row.
ROUNDS = (5, 25)
# The largest relative distance to the loop. cuDNN rounds to TF32; sums of half precision depend on their order.
TOLERANCE = {"float32": 0.02, "bfloat16": 0.15}


@dataclass
class Card:
    """The state of the process.

    Args:
        device: where the models are.
        built: the name and dtype of the workload.
        work: the workload; None before the first request.
        known: what the loop found of the workload, by name.
    """

    device: str
    built: tuple[str, str] = ("", "")
    work: Workload | None = None
    known: dict[str, Any] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        """Whether the clock and the memory are those of a GPU."""
        return self.device.startswith("cuda")

    @property
    def requests(self) -> dict[str, Request]:
        """What it answers."""
        return {"measure": self.measure}

    def about(self) -> dict[str, Any]:
        """Return the environment."""
        return run_environment(cuda=self.cuda)

    def measure(self, workload: str, dtype: str, quantity: str, method: str, seconds: float = 0.0) -> dict[str, Any]:
        """Set a method up, check its result, and return the measured fields of a record.

        Args:
            workload: the name of the workload.
            dtype: torch's name of the dtype.
            quantity: what is computed.
            method: the name of the method.
            seconds: of the timed calls together, within ROUNDS.
        """
        prepare = _method(method).prepare
        self._forget_programs()
        if self.built != (workload, dtype):
            self.work, self.known = None, {}
            work = build(workload).to(getattr(torch, dtype)).to(self.device)
            self.work, self.built = work, (workload, dtype)
        run = prepare(self.work, quantity).run
        clock = functools.partial(stopwatch.seconds, run, warm_up=False, cuda=self.cuda)
        (first_call_s,) = clock(times=1)
        error = self._error(run(), quantity)
        if not error < TOLERANCE[dtype]:
            return {"status": "wrong", "reason": f"differs from the loop by {error:.2g} of its norm", "error": error}
        (call_s,) = clock(times=1)
        times = clock(times=min(max(round(seconds / call_s), ROUNDS[0]), ROUNDS[1]))
        low, high = np.quantile(times, [0.25, 0.75])
        return {
            "median_s": statistics.median(times),
            "iqr_s": high - low,
            "rounds": len(times),
            "first_call_s": first_call_s,
            "error": error,
            "peak_bytes": stopwatch.peak_bytes(run, cuda=self.cuda),
            "kernel_s": stopwatch.kernel_seconds(run, cuda=self.cuda),
        }

    def _forget_programs(self) -> None:
        """Every row compiles for itself, and has the whole memory."""
        clear_cache()
        torch.compiler.reset()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def _error(self, result: Any, quantity: str) -> float:
        """The distance to the loop, relative to the norm of what the loop found: the largest of all results."""
        if not quantity.startswith("step"):
            return _distance(result, self._loop(quantity))
        parts = {"clipped_mean": result["update"], "norms": result["norms"]}
        products = [result[name].double().mean() for name in ("gram", "dot") if name in result]
        errors = [_distance(part, self._loop(name)) for name, part in parts.items()]
        return max([*errors, *(_distance(product, self._loop("product")) for product in products)])

    def _loop(self, name: str) -> Any:
        if name not in self.known:
            self.known[name] = self._product() if name == "product" else reference(self.work, name)
        return self.known[name]

    def _product(self) -> Tensor:
        """The inner product of the mean gradients of the batch and of the validation samples."""
        held_out = reference(replace(self.work, batch=self.work.held_out), "mean")
        return sum((g * held_out[name]).sum() for name, g in self._loop("mean").items())


def _method(name: str) -> Method:
    try:
        return methods_of(*(("opacus_",) if name.startswith("Opacus") else FILES["torch"]))[name]
    except ImportError as error:
        raise CannotError(str(error)) from error


def _distance(found: Any, expected: Any) -> float:
    if not isinstance(expected, dict):
        found, expected = {"": found}, {"": expected}
    apart = [(found[name].double() - x).norm() for name, x in expected.items()]
    return (torch.stack(apart).norm() / torch.stack([x.norm() for x in expected.values()]).norm()).item()


if __name__ == "__main__":
    answer_standard_input(functools.partial(Card, sys.argv[1]))
