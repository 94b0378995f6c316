"""Time and memory of calls, measured within one process. No framework is imported but torch, for CUDA."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Call = Callable[[], Any]


def seconds(call: Call, times: int, *, warm_up: bool, cuda: bool = False) -> list[float]:
    """Time calls one by one: freeing a result is not computing, and no garbage is collected meanwhile.

    Args:
        call: what is timed.
        times: how often.
        warm_up: whether a call that is not timed comes first (other processes have used the caches since the last).
        cuda: whether the device's own events are the clock.
    """
    gc.collect()
    gc.disable()
    try:
        if warm_up:
            call()
        clock = _cuda_seconds if cuda else _wall_seconds
        return [clock(call) for _ in range(times)]
    finally:
        gc.enable()


def _wall_seconds(call: Call) -> float:
    start = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def _cuda_seconds(call: Call) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    result = call()
    end.record()
    torch.cuda.synchronize()
    del result
    return start.elapsed_time(end) / 1e3


def peak_bytes(call: Call, *, cuda: bool = False) -> int | None:
    """Measure how many bytes a call holds at its peak beyond those held before it, its result included.

    On the CPU these are resident bytes of the process, as Linux counts them: whatever library allocates them, and
    memory that is never touched does not count. On CUDA they are those of torch's allocator.

    Returns:
        The bytes, or None where the system does not say.
    """
    gc.collect()
    return _cuda_peak(call) if cuda else _resident_peak(call)


def _cuda_peak(call: Call) -> int:
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def _resident_peak(call: Call) -> int | None:
    try:
        _give_back_freed_memory()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew from here
        before = _status("VmHWM")
    except OSError:  # not Linux
        return None
    result = call()
    peak = _status("VmHWM") - before
    del result
    return peak


def _give_back_freed_memory() -> None:
    """Return what earlier calls have freed to the system, or this one's memory would seem to be there already."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _status(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    match = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def limit_memory(extra: int, *, cuda: bool = False) -> None:
    """Let allocations fail that take the process more than so many bytes beyond what it holds now."""
    if cuda:
        import torch

        torch.cuda.set_per_process_memory_fraction(min(1.0, extra / torch.cuda.mem_get_info()[1]))
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + extra, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory ran out, in any library's words."""
    words = ("out of memory", "allocate memory", "bad_alloc", "resource_exhausted", "unable to allocate")
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)
