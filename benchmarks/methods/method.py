"""What a method of the benchmark is: a way to compute a quantity of a workload. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.quantities import COMMON

# Clipping norm of the clipped mean; what the variance divides by, n − CORRECTION; λ of the natural gradient.
MAX_NORM = 1.0
CORRECTION = 1
DAMPING = 1.0


class CannotError(Exception):
    """A method cannot do this workload or quantity; the message says why, in the library's words where it has some."""


@dataclass(frozen=True)
class Prepared:
    """A method set up for one workload and one quantity.

    Args:
        run: what is timed. It is synchronous (JAX: ``block_until_ready``; on CUDA the worker waits), and its result
            stays in the framework.
        numpy: from the result to arrays: ``[B]`` for norms, ``[B, B]`` for gram, by parameter name for all
            others.
        setup_seconds: compile time spent before the first run, if any (the worker also times the first run).
        has_pool: whether freed memory stays in a pool of the library's, so that no peak is to be seen from outside.
    """

    run: Callable[[], Any]
    numpy: Callable[[Any], dict[str, np.ndarray] | np.ndarray]
    setup_seconds: float = 0.0
    has_pool: bool = False


@dataclass(frozen=True)
class Method:
    """A way to compute quantities of workloads.

    Args:
        name: as the tables show it.
        environment: "torch", "torch-peers", "jax" or "mindspore".
        prepare: from (workload, quantity) to what is timed; raises ``CannotError`` with the reason, or lets the
            library's own error out, whose words are then the reason. The workload is a ``Workload`` where there is
            torch, else a ``Saved``.
        is_limit: a physical limit and not a gradient: it is timed, and not checked.
        shown_for: the quantities for which it has a row at all. What a library cannot do is a row, with the reason.
        shown_on: what the names of the workloads begin with for which it has a row.
    """

    name: str
    environment: str
    prepare: Callable[[Any, str], Prepared]
    is_limit: bool = False
    shown_for: tuple[str, ...] = COMMON
    shown_on: str = ""
