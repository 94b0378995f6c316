"""The environment that measurements depend on."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

import persample

_CHECKOUT = Path(persample.__file__).resolve().parents[1]


def environment() -> dict[str, str | int | None]:
    """Return the environment that results depend on; None for what is not known or not installed.

    Examples:
        >>> sorted(environment())[:4]
        ['cpu', 'git_revision', 'gymnasium', 'logical_cores']
    """
    packages = {name: version(name) for name in ("persample", "torch", "numpy", "gymnasium")}
    return {
        **packages,
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "logical_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "git_revision": _git_revision(),
    }


def run_environment(*, cuda: bool) -> dict[str, str | int | None]:
    """Return the same with the GPU, if there is one in use, and the date."""
    gpu = torch.cuda.get_device_name() if cuda else None
    return {**environment(), "gpu": gpu, "date": dt.datetime.now(dt.timezone.utc).date().isoformat()}


def version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name") or platform.processor() or None
    # Machines of one name differ by the generation of their processor, and torch's kernels by its vector instructions.
    kind = [f"{said} {fields[key]}" for key, said in (("cpu family", "family"), ("model", "model")) if key in fields]
    return name and f"{name} ({', '.join([*kind, torch.backends.cpu.get_cpu_capability()])})"


def _git_revision() -> str | None:
    # Only a .git beside the package counts: git itself would also find a checkout around the virtual environment
    # in which persample is installed.
    if not (_CHECKOUT / ".git").exists():
        return None
    command = ["git", "-C", str(_CHECKOUT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
