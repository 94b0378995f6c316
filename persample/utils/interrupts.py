"""Clean-up that a signal cannot skip: Ctrl-C may raise between any two bytecodes, also inside of a ``finally``."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import _GeneratorContextManager, contextmanager, suppress
from typing import TypeVar

from persample.utils.fallback import Explained
from persample.utils.flags import flags
from persample.utils.origin import raised
from persample.utils.thread_state import restore_shared_state, restore_thread_state, shared_state, thread_state

T = TypeVar("T")
_STEPS = {"__enter__", "__exit__"}
_CONTEXTS = {_GeneratorContextManager.__enter__.__code__, _GeneratorContextManager.__exit__.__code__}


def undone(body: Callable[[], T], undo: Callable[[], object]) -> T:
    """Call a function, then undo what it changed: a signal that interrupts one undoing finds the other.

    Args:
        body: the function.
        undo: puts everything back; called again if it was interrupted, perhaps with nothing left to do.

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
    """Call a function and leave torch's state of this thread as it was, wherever a signal interrupts the call.

    Args:
        body: the function.

    Returns:
        What ``body`` returns.

    Examples:
        >>> import torch
        >>> in_same_state(lambda: torch.set_grad_enabled(False)).prev, torch.is_grad_enabled()
        (True, True)
    """
    handled = sys.exc_info()[1]  # by the caller, before the call
    state, shared, ours = thread_state(), shared_state(), dict(vars(flags))
    show = warnings.showwarning

    def undo() -> None:
        errors = list(raised(sys.exc_info()[1], handled))
        for error in errors:
            _close_contexts(error)
        restore_thread_state(state)
        if any(map(_broke_off, errors)):  # or else what is shared is another thread's affair
            restore_shared_state(shared)
        if vars(flags) != ours:
            vars(flags).clear()
            vars(flags).update(ours)
        if isinstance(warnings.showwarning, Explained):
            warnings.showwarning = show

    def noted() -> T:
        flags.handled = handled
        return body()

    with interrupts_first():
        return undone(noted, undo)


@contextmanager
def interrupts_first() -> Iterator[None]:
    """Raise an interrupt again where torch raised another error meanwhile, in a clean-up that the interrupt broke off.

    Raises:
        BaseException: the interrupt.
    """
    handled = sys.exc_info()[1]
    try:
        yield
    except Exception as error:
        for cause in raised(error, handled):
            if not isinstance(cause, Exception):
                raise cause from None
        raise


def _close_contexts(error: BaseException) -> None:
    """Close ``@contextmanager`` functions whose exit was interrupted: closed later, they would change a later call.

    Args:
        error: what was raised.
    """
    for frame in reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)]):
        if frame.f_code in _CONTEXTS:
            with suppress(Exception):  # what it restores may be restored already
                frame.f_locals["self"].gen.close()


def _broke_off(error: BaseException) -> bool:
    """Return whether an error was raised while a context was entered or left, whose work may be half done.

    Args:
        error: what was raised.
    """
    return any(frame.f_code.co_name in _STEPS for frame, _ in traceback.walk_tb(error.__traceback__))
