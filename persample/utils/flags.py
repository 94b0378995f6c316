"""State of this thread that lasts as long as one call.

It cannot be an argument, because the user's loss or torch's own code runs between the code that sets it and the code
that reads it. Each context restores the previous value; ``isolation.isolated`` does so if a signal interrupts it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

flags = threading.local()


@contextmanager
def inside(function: str, owner: Any = None) -> Iterator[None]:
    """Mark that a user's function that is differentiated runs: gradients computed inside would be constants there.

    Args:
        function: the name of the function, for error messages.
        owner: the ``ParamTree`` whose tensors the function must leave alone; None if there is none.

    Raises:
        Exception: a refusal that was raised inside, even if the function, or torch, caught it.
    """
    before = getattr(flags, "inside", None), getattr(flags, "owner", None), None
    flags.inside, flags.owner, flags.refusal = function, owner, None
    try:
        yield
    finally:
        refusal = flags.refusal
        flags.inside, flags.owner, flags.refusal = before
        if refusal is not None:
            raise refusal


def is_inside() -> str | None:
    """Return the name of the user's function that runs in this thread, or None."""
    return getattr(flags, "inside", None)


def owner_inside() -> Any:
    """Return the owner of the tensors that the function of ``is_inside`` must leave alone, or None."""
    return getattr(flags, "owner", None)
