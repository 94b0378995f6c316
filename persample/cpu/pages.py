"""Keep the pages of memory that was freed: to get new ones from the system can take longer than to compute on them."""

from __future__ import annotations

import ctypes
import os

import torch

# The largest block that moves glibc's thresholds (DEFAULT_MMAP_THRESHOLD_MAX in malloc.c: 32 MiB, with its header).
_LARGEST = 2**25 - 2**16
_KEPT = 2**28
_TRIM_THRESHOLD = -1  # M_TRIM_THRESHOLD in malloc.h


def keep() -> None:
    """Let glibc keep up to 256 MiB of freed memory for the next call.

    Else it hands the end of its heap back to the system whenever more than 128 KiB of it are free (64 MiB once a large
    block was freed), and the next call has its pages faulted in and zeroed anew: 16 000 of them and 10 to 100 of 100 ms
    in clipped gradients of a transformer (measured, 2 cores). The block is never written, so that it costs nothing: it
    lets later blocks come from the heap. Other allocators do not mind, and thresholds of the user's stay.
    """
    torch.empty(_LARGEST, dtype=torch.uint8, device="cpu")
    chosen = "MALLOC_TRIM_THRESHOLD_" in os.environ or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if not chosen and os.name == "posix" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_TRIM_THRESHOLD, _KEPT)
