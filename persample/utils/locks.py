"""Locks that no interrupt leaves held: ``with lock`` does, if an exception comes at the line that releases it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from persample.utils.interrupts import undone

T = TypeVar("T")


def locked(locks: Sequence[threading.RLock], body: Callable[[], T]) -> T:
    """Call a function while this thread holds locks.

    Args:
        locks: the locks, acquired in this order.
        body: the function.

    Returns:
        What ``body`` returns.

    Examples:
        >>> locked([threading.RLock()], lambda: 3)
        3
    """
    held: list[threading.RLock] = []
    acquire, release = type(locks[0]).acquire, type(locks[0]).release
    releases = map(release, held)  # an iterator: after an interrupt it goes on, so that each lock is released once

    def while_held() -> T:
        held.extend(filter(acquire, locks))  # in C: a signal cannot come between acquiring a lock and listing it
        return body()

    return undone(while_held, lambda: deque(releases, 0))
