"""One thread at a time: torch traces in one, and what it captured refuses to run beside a trace."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from persample.utils.locks import locked

P = ParamSpec("P")
T = TypeVar("T")
_lock = threading.RLock()


def in_one_thread(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that waits while another thread is in a function made by this one.

    Args:
        function: the function.
    """

    @functools.wraps(function)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
        return locked((_lock,), lambda: function(*args, **kwargs))

    return waiting
