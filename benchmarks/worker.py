"""A process that measures one method in any environment, and answers requests in lines of JSON.

``python -m benchmarks.worker ENVIRONMENT [cuda]`` first writes a line with its methods. Then it reads lines such as
``{"do": "prepare", "method": …}`` and answers each with one line; after a failure, the answer has a ``status`` and a
``reason``. Between requests it is idle, so that other workers can take their turns. It ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, TextIO

from benchmarks import saved, stopwatch
from benchmarks.methods import load
from benchmarks.methods.method import CannotError, Method, Prepared
from benchmarks.quantities import agrees

# Environments whose methods take the workload itself; the others take saved workloads.
WITH_TORCH = ("torch", "torch-peers")
Request = Callable[..., dict[str, Any]]
# Packages whose versions are recorded.
PACKAGES = ("opacus", "backpack-for-pytorch", "torchjd", "jax", "jax-privacy", "mindspore")


@dataclass
class Worker:
    """The state of the process.

    Args:
        methods: the methods by name.
        takes_saved: whether the methods take saved workloads.
        cuda: whether the workload is moved to the GPU.
        prepared: the prepared method.
    """

    methods: dict[str, Method]
    takes_saved: bool = False
    cuda: bool = False
    prepared: Prepared | None = None

    @property
    def requests(self) -> dict[str, Request]:
        """What it answers."""
        return {"prepare": self.prepare, "time": self.time, "memory": self.memory}

    def about(self) -> dict[str, Any]:
        """Return the methods and packages of this environment."""
        methods = [[m.name, m.shown_for, m.is_limit, m.shown_on] for m in self.methods.values()]
        versions = {name: _version(name) for name in PACKAGES}
        return {"methods": methods, "packages": {name: v for name, v in versions.items() if v is not None}}

    def prepare(self, method: str, workload: str, quantity: str, folder: str, limit: int) -> dict[str, Any]:
        """Set a method up, call it twice (the first call may compile), and check the second result."""
        stopwatch.limit_memory(limit, cuda=self.cuda)
        chosen = self.methods[method]
        self.prepared = prepared = chosen.prepare(self._workload(workload, Path(folder)), quantity)
        first = _timed(prepared.run)[1]  # the first result is freed before the second call
        result, second = _timed(prepared.run)
        facts = {"first_call_s": prepared.setup_seconds + first, "call_s": second}
        if chosen.is_limit:
            return {"status": "ok", **facts}
        truth = saved.load_truth(Path(folder) / f"{quantity}.npz")
        error, wrong = agrees(prepared.numpy(result), truth, quantity)
        return {"status": "wrong" if wrong else "ok", "reason": wrong or "", "error": error, **facts}

    def time(self, times: int, *, warm_up: bool) -> dict[str, Any]:
        """Return the seconds of a few calls."""
        return {"seconds": stopwatch.seconds(self.prepared.run, times, warm_up=warm_up, cuda=self.cuda)}

    def memory(self) -> dict[str, Any]:
        """Return the peak bytes of one call."""
        hidden = self.prepared.has_pool
        return {"peak_bytes": None if hidden else stopwatch.peak_bytes(self.prepared.run, cuda=self.cuda)}

    def _workload(self, name: str, folder: Path) -> Any:
        if self.takes_saved:
            return saved.load(folder / "workload.npz")
        from benchmarks.workloads import build

        work = build(name)
        if not saved.equal(work.saved(), saved.load(folder / "workload.npz")):
            raise RuntimeError("the same seed gives other numbers in this environment")
        return work.to("cuda") if self.cuda else work


def _timed(call: stopwatch.Call) -> tuple[Any, float]:
    start = time.perf_counter()
    return call(), time.perf_counter() - start


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class Answers(Protocol):
    """What a process does: it describes itself, and answers requests by name."""

    def about(self) -> dict[str, Any]: ...

    @property
    def requests(self) -> dict[str, Request]: ...


def answer(worker: Answers, do: str, **arguments: Any) -> dict[str, Any]:
    """Answer a request; a failure is answered with its status and the original message."""
    try:
        return worker.requests[do](**arguments)
    except CannotError as error:
        return {"status": "cannot", "reason": str(error), "untouched": True}
    except Exception as error:  # noqa: BLE001 - whatever a library raises is its answer
        words = f"{type(error).__name__}: {_first_words(str(error))}"
        if not stopwatch.is_out_of_memory(error):
            return {"status": "cannot", "reason": words}
        limit = arguments.get("limit")
        return {"status": "out of memory", "reason": f"asks for more than {limit / 2**30:.0f} GiB" if limit else words}


def _first_words(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 200 else words[:199] + "…"


def serve(worker: Answers, requests: Iterable[str], answers: TextIO) -> None:
    """Answer requests line by line."""
    print(json.dumps(worker.about()), file=answers, flush=True)
    for request in requests:
        print(json.dumps(answer(worker, **json.loads(request))), file=answers, flush=True)


def answer_standard_input(make: Callable[[], Answers]) -> None:
    """Answer the requests of a ``Process`` until they end."""
    stopwatch.keep_freed_memory()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keep output of libraries apart from the answers
    serve(make(), sys.stdin, answers)


def main() -> None:
    environment, *options = sys.argv[1:]
    answer_standard_input(lambda: Worker(load(environment), environment not in WITH_TORCH, "cuda" in options))


if __name__ == "__main__":
    main()
