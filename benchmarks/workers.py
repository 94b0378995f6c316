"""The workers of a run: available environments, their methods, and fresh processes."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

from benchmarks.cells import Cell, Listed
from benchmarks.process import PYTHONS, ROOT, Process
from benchmarks.targets import COLD
from benchmarks.worker import WITH_TORCH


class Workers:
    """Processes by environment; a process in which no method ran is reused.

    Args:
        cuda: whether they use the GPU, which only environments with torch can.
        cold: whether the run uses compile caches of its own, initially empty.
        shared: whether the methods of a workload take turns in one process per environment: half of the time, and no
            memory of theirs that means anything.

    Attributes:
        methods: the available methods.
        packages: versions of the peers.
        missing: the names of missing environments.
    """

    def __init__(self, *, cuda: bool = False, cold: bool = True, shared: bool = False):
        self.cuda, self._cold, self._shared = cuda, cold, shared
        self._caches = Path(tempfile.mkdtemp(prefix="persample-bench-"))
        self._all: list[Process] = []
        there = [name for name, python in PYTHONS.items() if python.exists() and (name in WITH_TORCH or not cuda)]
        self.missing = [name for name in PYTHONS if name not in there]
        self._spare = {name: self._start(name) for name in there}
        abouts = {name: process.about for name, process in self._spare.items()}
        self.methods = [Listed(name, env, *rest) for env in there for name, *rest in abouts[env]["methods"]]
        self.packages = {name: version for env in there for name, version in abouts[env]["packages"].items()}

    @contextlib.contextmanager
    def of(self, cell: Cell, trial: int = 0) -> Iterator[Process]:
        """Yield a process for one cell; it is kept if it may serve another one of the same workload and trial."""
        environment = cell.method.environment
        if cell.key in COLD and self._cold:
            process = self._start(environment, cache="cold")
        else:
            process = self._spare.pop(environment, None) or self._start(environment)
        serves = cell.workload, trial
        if process.used and process.serves != serves:
            self._end(process)
            process = self._start(environment)
        process.serves = serves
        yield process
        if environment in self._spare or (process.used and not (self._shared and process.is_alive)):
            self._end(process)
        else:
            self._spare[environment] = process

    def _start(self, environment: str, cache: str = "shared") -> Process:
        folder = str(self._caches / cache) if self._cold else None
        process = Process(environment, cuda=self.cuda, cache=folder)
        self._all.append(process)
        return process

    def _end(self, process: Process) -> None:
        process.end()
        self._all.remove(process)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._all:
            process.end()
        shutil.rmtree(self._caches, ignore_errors=True)


@contextlib.contextmanager
def truth_of(workload: str, quantities: Iterable[str]) -> Iterator[str]:
    """Write a workload and its references to a folder, in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.oracle", workload, folder, *sorted({"mean", *quantities})]
        subprocess.run(command, cwd=ROOT, check=True, start_new_session=True)  # Ctrl-C reaches the runner only
        yield folder
