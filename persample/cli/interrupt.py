"""Ctrl-C as a request to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a request to stop; the second one interrupts at once.

    Yields:
        A function that returns whether a stop was requested.

    Examples:
        >>> with interruptible() as stop_asked:
        ...     signal.raise_signal(signal.SIGINT)
        ...     stop_asked()
        True
    """
    asked = threading.Event()

    def ask(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
