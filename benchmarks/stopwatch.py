"""Time and memory of calls within one process. The only imported framework is torch, for CUDA."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Call = Callable[[], Any]


def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB of freed memory, for every method alike.

    In a process with compiled programs ``keep_freed_memory`` does the same; workers without torch cannot import it.
    """
    np.empty(2**25 - 2**16, np.uint8)


def seconds(call: Call, times: int, *, warm_up: bool, cuda: bool = False) -> list[float]:
    """Time calls one by one, without the freeing of results and without garbage collection.

    Args:
        call: the function to time.
        times: the number of calls.
        warm_up: whether an untimed call comes first, as other processes may have evicted the caches.
        cuda: whether to measure with events of the device.
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
    """Measure the peak bytes of a call, result included, minus the bytes held before it.

    On the CPU these are resident bytes of the process, as Linux counts them: allocations of all libraries, without
    memory that is never touched. On CUDA they are the bytes of torch's allocator.

    Returns:
        The bytes, or None if the system does not report them.
    """
    gc.collect()
    return _cuda_peak(call) if cuda else _resident_peak(call)


def kernel_seconds(call: Call, *, cuda: bool = False) -> float | None:
    """Return the seconds of one call in which the device computes: of all kernels on a GPU, else of all operators."""
    import torch
    from torch.autograd import DeviceType

    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if cuda else [])]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call()
        if cuda:
            torch.cuda.synchronize()
    if not cuda:
        return sum(event.self_cpu_time_total for event in profile.events()) / 1e6
    kernels = [x for x in profile.events() if x.device_type == DeviceType.CUDA and not x.is_user_annotation]
    return sum(kernel.self_device_time_total for kernel in kernels) / 1e6 or None


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
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
        before = _status("VmHWM")
    except OSError:  # not Linux
        return None
    result = call()
    peak = _status("VmHWM") - before
    del result
    return peak


def _give_back_freed_memory() -> None:
    """Return memory freed by earlier calls to the system; the next call would otherwise reuse it unmeasured."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _status(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    match = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def limit_memory(extra: int, *, cuda: bool = False) -> None:
    """Limit the memory that the process may allocate beyond its current memory; further allocations fail."""
    if cuda:
        import torch

        torch.cuda.set_per_process_memory_fraction(min(1.0, extra / torch.cuda.mem_get_info()[1]))
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + extra, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of any library means that memory ran out."""
    words = ("out of memory", "allocate memory", "bad_alloc", "resource_exhausted", "unable to allocate")
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)
