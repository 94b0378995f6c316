"""State of this thread that lasts as long as one call.

It cannot be an argument: the user's loss, or torch's own code, stands between where it is set and where it is read.
Every context restores what it found, and ``interrupts.in_same_state`` restores all of it if a signal interrupts one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

flags = threading.local()


@contextmanager
def inside(function: str) -> Iterator[None]:
    """Mark that a differentiated function of the user's runs: ``per_sample_grads`` called from there would be constant.

    Args:
        function: its name, for error messages.
    """
    before, flags.inside = is_inside(), function
    try:
        yield
    finally:
        flags.inside = before


def is_inside() -> str | None:
    """Return the name of the user's function that runs in this thread, or None."""
    return getattr(flags, "inside", None)
