"""One thread at a time, those of ``torch.compile`` included: torch traces in one, and flags of a trace are for all."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from persample._torch import compile_lock
from persample.utils.interrupts import after_imports
from persample.utils.locks import locked

P = ParamSpec("P")
T = TypeVar("T")


def in_one_thread(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that waits while another thread compiles, or is in a function made by this one.

    Args:
        function: the function.
    """

    @functools.wraps(function)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
        lock = compile_lock() if "torch._dynamo.convert_frame" in sys.modules else after_imports(compile_lock)
        return locked((lock,), lambda: function(*args, **kwargs))

    return waiting
