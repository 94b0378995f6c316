"""Memory that was freed, and that the next call of a program takes again."""

from __future__ import annotations

import contextlib
import functools

import torch

# glibc maps a block of this size alone; its limit is 32 MiB, with a header. Once one is freed, the next is in the heap.
_LARGEST = 2**25 - 2**16


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep what is freed, up to 64 MiB in each thread, as it does once any block of 32 MiB was freed.

    glibc keeps at most twice the largest block that it ever mapped and freed. A program frees tens of smaller blocks at
    once. Without this, its next call meets fresh pages, which the system clears: up to a third of the time of a call.
    The block is not written, so it takes no memory. Where glibc's variables or another C library decide, nothing
    changes.

    References:
        ``M_MMAP_THRESHOLD`` and ``M_TRIM_THRESHOLD`` in the manual page mallopt(3).
    """
    with contextlib.suppress(RuntimeError):  # no room for the block: the program may have enough
        torch.UntypedStorage(_LARGEST, device="cpu")
