"""The runner's side of a worker: start it in its environment, send requests with a time limit, end it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
# `make bench-peers` creates these environments.
PYTHONS = {
    "torch": Path(sys.executable),
    "torch-peers": ROOT / ".venv-peers/bin/python",
    "jax": ROOT / ".venv-jax/bin/python",
    "mindspore": ROOT / ".venv-mindspore/bin/python",
}

# Time limit in seconds of a worker's imports.
_START_TIMEOUT = 120.0


class FailedError(Exception):
    """A worker failed or did not answer; status and reason are those of a record."""

    def __init__(self, status: str, reason: str, error: float | None = None):
        super().__init__(reason)
        self.status, self.reason, self.error = status, reason, error


class Process:
    """A worker in a process of its own, in which nothing was measured before.

    Args:
        environment: the environment of its Python.
        cuda: whether it uses the GPU.
        cache: the folder of compiled code; None: the user's folder.
        command: the module that answers, and its arguments.

    Attributes:
        about: the worker's description of its environment.
        used: whether any method ran in it.
        serves: what it was last used for: a workload, and which of the trials.
    """

    serves = ("", 0)

    def __init__(self, environment: str, *, cuda: bool = False, cache: str | None = None, command: Sequence[str] = ()):
        self.environment = environment
        self.used = False
        # Output of libraries goes to a stream of its own: a pipe without a reader would fill up.
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end
        self._process = subprocess.Popen(
            [PYTHONS[environment], "-m", *(command or ("benchmarks.worker", environment, *(["cuda"] if cuda else [])))],
            cwd=ROOT,
            env={**os.environ, **({"TORCHINDUCTOR_CACHE_DIR": cache} if cache else {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            bufsize=0,
            start_new_session=True,  # Ctrl-C reaches the runner only
        )
        self.about = self._answer(_START_TIMEOUT)

    @property
    def is_alive(self) -> bool:
        """Whether it can answer."""
        return self._process.poll() is None

    def ask(self, do: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        """Send a request; raises ``FailedError`` if the worker fails, or does not answer in time."""
        self.used = True
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        facts = self._answer(timeout)
        self.used = not facts.get("untouched", False)
        if facts.get("status", "ok") != "ok":
            raise FailedError(facts["status"], facts["reason"], facts.get("error"))
        return facts

    def _answer(self, timeout: float) -> dict[str, Any]:
        answers = self._process.stdout
        if not select.select([answers], [], [], timeout)[0]:
            self.end()
            raise FailedError("too slow", f"took more than {timeout:.0f} s")
        line = answers.readline()
        if not line:
            raise FailedError(*self._last_words())
        return json.loads(line)

    def _last_words(self) -> tuple[str, str]:
        code = self._process.wait()
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        if code == -signal.SIGKILL or "bad_alloc" in last:
            return "out of memory", "the system ended the process"
        return "cannot", f"the process ended with code {code}: {last.strip()[:200]}"

    def end(self) -> None:
        """End the process and its children."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._words.close()
