"""Memory that was freed, and that the next call of a program takes again."""

from __future__ import annotations

import functools

import torch

# glibc maps a block of up to 32 MiB, its own header included, by itself once; later ones of that size are in its heap.
_LARGEST = 2**25 - 2**16


@functools.cache
def keep_freed_memory() -> None:
    """Let the C library keep what compiled programs free, up to 64 MiB, as it does after any block of 32 MiB was freed.

    glibc keeps at most twice the largest block that was ever freed, up to that size, and gives the rest back to the
    system. A program frees tens of smaller blocks at once, and would meet fresh pages in the next call, which the
    system clears first: up to a third of the time of a call. Nothing is written into the block, so it takes no memory,
    and where glibc's variables or another C library decide, it has no effect.

    References:
        ``M_MMAP_THRESHOLD`` and ``M_TRIM_THRESHOLD`` in the manual page mallopt(3).
    """
    torch.empty(_LARGEST, dtype=torch.uint8, device="cpu")
