"""Time and peak memory of function calls, for the command line and the benchmarks; the environment of a measurement."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

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


def time_rounds(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    device: torch.device | str = "cpu",
    progress: Callable[[int], object] | None = None,
) -> dict[str, list[float]]:
    """Time several functions side by side: one warm-up each, then rounds in which each runs once.

    Alternating calls share the slow phases of the machine, so that the ratios of their times hold.

    Args:
        calls: the functions, by name.
        rounds: how many times each is timed.
        device: the device of the computation; on CUDA the clock waits for the device.
        progress: called with 1 after every call that was timed.

    Returns:
        The seconds of every round, by name.

    Examples:
        >>> seconds = time_rounds({"sum": lambda: torch.ones(10).sum()}, rounds=3)
        >>> len(seconds["sum"]), min(seconds["sum"]) > 0
        (3, True)
    """
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(_seconds(call, torch.device(device)))
            if progress is not None:
                progress(1)
    return seconds


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        _synchronize(device)
        start = time.perf_counter()
        result = call()
        _synchronize(device)
        elapsed = time.perf_counter() - start
        del result  # the clock excludes freeing the result
        return elapsed
    finally:
        if collecting:
            gc.enable()


def peak_memory(call: Callable[[], object], *, device: torch.device | str = "cpu") -> int:
    """Measure the peak bytes of a call, minus the bytes held before it.

    The bytes are those of torch's allocator, results included, not those of the process: they are exact, and equal in
    every run. On the CPU they are the running sum of the profiler's memory events.

    Args:
        call: the function.
        device: the device whose memory is counted.

    Returns:
        The bytes.

    Examples:
        >>> peak_memory(lambda: torch.ones(250) + torch.ones(250))  # both terms and the sum
        3000
    """
    if torch.device(device).type == "cuda":
        return _peak_memory_cuda(call, torch.device(device))
    held = peak = 0
    for nbytes in _allocations(call):
        held += nbytes
        peak = max(peak, held)
    return peak


def largest_allocation(call: Callable[[], object]) -> int:
    """Return the bytes of the largest tensor that a call allocates on the CPU.

    Examples:
        >>> largest_allocation(lambda: torch.ones(250) + torch.ones(1))
        1000
    """
    return max(_allocations(call), default=0)


def _allocations(call: Callable[[], object]) -> list[int]:
    """Return the bytes of all allocations (negative: of deallocations) on the CPU, in order."""
    # Otherwise kineto writes a line to stderr at every start and stop. It reads the variable once, at its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    del result
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    ordered = sorted(events, key=lambda event: event.start_ns())
    return [event.nbytes() for event in ordered if event.device_type().name == "CPU"]


def _peak_memory_cuda(call: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def relative_difference(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the largest relative difference of two updates, max over parameters of max|a − b| / max|b|.

    It is 0 if both are zero, ∞ if only b is zero, NaN if any entry is NaN.

    Examples:
        >>> relative_difference({"w": torch.tensor([1.0, 3.0])}, {"w": torch.tensor([1.0, 4.0])})
        0.25
    """
    ratios = [_ratio((actual[name] - value).abs().max(), value.abs().max()) for name, value in expected.items()]
    return torch.stack(ratios).max().item()


def _ratio(difference: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.where(difference == 0, difference, difference / scale).double()
