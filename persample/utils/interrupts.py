"""Clean-up that a signal cannot skip: Ctrl-C may raise between any two bytecodes, also inside of a ``finally``."""

from __future__ import annotations

import _thread
import functools
import inspect
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import _GeneratorContextManager, suppress
from types import FrameType
from typing import ParamSpec, TypeVar

from persample._torch import DONE_ONCE, compile_lock
from persample.utils.origin import raised_since

P = ParamSpec("P")
T = TypeVar("T")
_IMPORTS = "<frozen importlib._bootstrap>"  # the file of the frames of an import
_PAUSE = 0.01  # seconds
_STEPS = {"__enter__", "__exit__"}
_CONTEXTS = {_GeneratorContextManager.__enter__.__code__, _GeneratorContextManager.__exit__.__code__}


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
    handlers = {int(x): handler for x in signal.valid_signals() if callable(handler := signal.getsignal(x))}

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
            signal.signal(number, handle)
        return body()

    def put_back() -> None:
        for number, handler in handlers.items():
            if signal.getsignal(number) is handle:  # else the body has set its own
                signal.signal(number, handler)
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


def raise_interrupt(error: Exception, handled: BaseException | None) -> None:
    """Raise an interrupt again if torch raised another error while cleaning up after that interrupt.

    Args:
        error: the error.
        handled: the error that was handled before the ``try``, as ``sys.exc_info`` tells.

    Raises:
        BaseException: the interrupt.
    """
    for cause in raised_since(handled, error):
        if not isinstance(cause, Exception):
            raise cause from None


def close_contexts(error: BaseException | None, handled: BaseException | None) -> None:
    """Close ``@contextmanager`` generators whose exit was interrupted; garbage collection would close them too late.

    Args:
        error: the error that ends a call, or None.
        handled: the error that was handled before the call, as ``sys.exc_info`` tells.
    """
    for link in raised_since(handled, error):
        for frame in reversed([frame for frame, _ in traceback.walk_tb(link.__traceback__)]):
            if frame.f_code in _CONTEXTS:
                with suppress(Exception):  # the context may be restored already
                    frame.f_locals["self"].gen.close()


def broke_off(error: BaseException | None, handled: BaseException | None) -> bool:
    """Return whether an error was raised inside of an ``__enter__`` or ``__exit__``, which may be half done.

    Args:
        error: the error that ends a call, or None.
        handled: the error that was handled before the call, as ``sys.exc_info`` tells.
    """
    tracebacks = (traceback.walk_tb(link.__traceback__) for link in raised_since(handled, error))
    return any(frame.f_code.co_name in _STEPS for frames in tracebacks for frame, _ in frames)


def in_one_thread(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that waits while another thread compiles, or is in a function made by this one.

    Args:
        function: the function.
    """

    @functools.wraps(function)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
        lock = compile_lock() if "torch._dynamo.convert_frame" in sys.modules else after_imports(compile_lock)
        with lock:
            return function(*args, **kwargs)

    return waiting
