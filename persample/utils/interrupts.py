"""Clean-up that a signal cannot skip: Ctrl-C may raise between any two bytecodes, also inside of a ``finally``."""

from __future__ import annotations

# As ``signal``, which makes an enum of each number: of all signals that takes 0.1 ms.
import _signal  # type: ignore[import-not-found]
import _thread
import inspect
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import _GeneratorContextManager, contextmanager, suppress
from types import FrameType
from typing import TypeVar

from persample._torch import DONE_ONCE
from persample.utils.flags import flags
from persample.utils.origin import handled_error, raised_since
from persample.utils.thread_state import restore_shared_state, restore_thread_state, shared_state, thread_state

T = TypeVar("T")
_STEPS = {"__enter__", "__exit__"}
_IMPORTS = "<frozen importlib._bootstrap>"  # the file of the frames of an import
_PAUSE = 0.01  # seconds
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


def in_same_state(body: Callable[[], T]) -> T:
    """Call a function and restore torch's state of this thread, wherever a signal interrupts the call.

    Args:
        body: the function.

    Returns:
        What ``body`` returns.

    Examples:
        >>> import torch
        >>> in_same_state(lambda: torch.set_grad_enabled(False)).prev, torch.is_grad_enabled()
        (True, True)
    """
    handled = handled_error()
    state, shared, ours = thread_state(), shared_state(), dict(vars(flags))

    def undo() -> None:
        errors = list(raised_since(handled, sys.exc_info()[1]))
        for error in errors:
            _close_contexts(error)
        restore_thread_state(state)
        if any(map(_broke_off, errors)):  # otherwise another thread may have changed the shared state
            restore_shared_state(shared)
        if vars(flags) != ours:
            vars(flags).clear()
            vars(flags).update(ours)

    is_cold = "torch._dynamo" not in sys.modules  # torch.func imports it
    with interrupts_first():
        return undone((lambda: after_imports(body)) if is_cold else body, undo)


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


def _close_contexts(error: BaseException) -> None:
    """Close ``@contextmanager`` generators whose exit was interrupted; garbage collection would close them too late."""
    for frame in reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)]):
        if frame.f_code in _CONTEXTS:
            with suppress(Exception):  # the context may be restored already
                frame.f_locals["self"].gen.close()


def _broke_off(error: BaseException) -> bool:
    """Return whether an error was raised inside of an ``__enter__`` or ``__exit__``, which may be half done."""
    return any(frame.f_code.co_name in _STEPS for frame, _ in traceback.walk_tb(error.__traceback__))
