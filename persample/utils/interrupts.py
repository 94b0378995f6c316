"""Clean-up and locks that a signal cannot skip: Ctrl-C may raise between any two bytecodes, also in a ``finally``."""

from __future__ import annotations

# As ``signal``, which makes an enum of each number: of all signals that takes 0.1 ms.
import _signal  # type: ignore[import-not-found]
import _thread
import functools
import inspect
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import ParamSpec, TypeVar

from persample._torch import DONE_ONCE, compile_lock
from persample.utils.origin import handled_error, raised_since

P = ParamSpec("P")
T = TypeVar("T")
_IMPORTS = "<frozen importlib._bootstrap>"  # the file of the frames of an import
_PAUSE = 0.01  # seconds


def undone(body: Callable[[], T], undo: Callable[[], object]) -> T:
    """Call a function, then undo its changes; if a signal interrupts ``undo``, ``undo`` is called again.

    Args:
        body: the function.
        undo: puts everything back. A second call must be harmless where the first one has finished parts of the work.

    Returns:
        What ``body`` returns.

    Examples:
        >>> entered = ["loss"]
        >>> undone(lambda: len(entered), entered.clear), entered
        (1, [])
    """
    done = False
    try:
        try:
            return body()
        finally:
            undo()
            done = True
    finally:
        if not done:
            undo()


def after_imports(body: Callable[[], T]) -> T:
    """Call a function; a signal that comes while it imports a module is handled once the import is done.

    Torch's compiler, imported at its first use, does not survive half an import: it refuses to register twice what it
    registers. The same holds for what ``DONE_ONCE`` names. Other threads are not interrupted by signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return body()
    here, waiting = inspect.currentframe(), set[int]()
    handlers = {x: handler for x in range(1, signal.NSIG) if callable(handler := _signal.getsignal(x))}

    def handle(number: int, frame: FrameType | None) -> None:
        waiting.discard(number)
        if _is_importing(frame, here):
            waiting.add(number)
            _thread.start_new_thread(again, (number,))  # takes no lock that the import may hold
        else:
            handlers[number](number, frame)

    def again(number: int) -> None:
        time.sleep(_PAUSE)
        if number in waiting:
            signal.raise_signal(number)

    def handled() -> T:
        for number in handlers:
            _signal.signal(number, handle)
        return body()

    def put_back() -> None:
        for number, handler in handlers.items():
            if _signal.getsignal(number) is handle:  # else the body has set its own
                _signal.signal(number, handler)
        while waiting:
            signal.raise_signal(waiting.pop())

    return undone(handled, put_back)


def _is_importing(frame: FrameType | None, outer: FrameType | None) -> bool:
    """Return whether an import, or what torch does once, is among the frames inside of another one."""
    while frame is not None and frame is not outer:
        if frame.f_code.co_filename == _IMPORTS or frame.f_code.co_name in DONE_ONCE:
            return True
        frame = frame.f_back
    return False


@contextmanager
def interrupts_first() -> Iterator[None]:
    """Raise an interrupt again if torch raised another error while cleaning up after that interrupt.

    Raises:
        BaseException: the interrupt.
    """
    handled = handled_error()
    try:
        yield
    except Exception as error:
        for cause in raised_since(handled, error):
            if not isinstance(cause, Exception):
                raise cause from None
        raise


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
