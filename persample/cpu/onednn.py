"""oneDNN, the library beside MKL in torch: where it is the faster one on CPUs."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def is_ahead() -> bool:
    """Return whether it is here, and MKL leaves AVX-512 unused: on processors that are not Intel's."""
    cpu: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    wide = cpu.get("avx512_f", False) and "Intel" not in cpu.get("cpu_name", "Intel")
    return bool(wide and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available())


def computes() -> bool:
    """Return whether what suits it is left to it."""
    return is_ahead() and is_allowed()


def is_allowed() -> bool:
    """Return whether the user lets it compute (``torch.backends.mkldnn.flags``)."""
    return bool(torch.backends.mkldnn.enabled)
