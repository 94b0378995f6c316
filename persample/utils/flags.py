"""State of this thread that lasts as long as one call.

It cannot be an argument, because the user's loss or torch's own code runs between the code that sets it and the code
that reads it. Each context restores the previous value; ``interrupts.in_same_state`` does so if a signal interrupts it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

flags = threading.local()


@contextmanager
def inside(function: str) -> Iterator[None]:
    """Mark that a user's function that is differentiated runs: gradients computed inside would be constants there.

    Args:
        function: the name of the function, for error messages.
    """
    before, flags.inside = is_inside(), function
    try:
        yield
    finally:
        flags.inside = before


def is_inside() -> str | None:
    """Return the name of the user's function that runs in this thread, or None."""
    return getattr(flags, "inside", None)
