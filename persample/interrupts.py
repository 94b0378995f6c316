"""Clean-up that a signal cannot skip: Ctrl-C may raise between any two bytecodes, also inside of a ``finally``."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import _GeneratorContextManager, contextmanager, suppress
from typing import TypeVar

from persample import _torch
from persample.fallback import Explained
from persample.flags import flags

T = TypeVar("T")
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
        >>> in_same_state(lambda: torch._C._set_grad_enabled(False)), torch.is_grad_enabled()
        (None, True)
    """
    handled = sys.exc_info()[1]  # by the caller, before the call
    state, ours, show = _torch.thread_state(), dict(vars(flags)), warnings.showwarning

    def undo() -> None:
        for error in _raised(sys.exc_info()[1], handled):
            _close_contexts(error)
        _torch.restore_thread_state(state)
        if vars(flags) != ours:
            vars(flags).clear()
            vars(flags).update(ours)
        if isinstance(warnings.showwarning, Explained):
            warnings.showwarning = show

    with interrupts_first():
        return undone(body, undo)


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
        for cause in _raised(error, handled):
            if not isinstance(cause, Exception):
                raise cause from None
        raise


def _raised(error: BaseException | None, handled: BaseException | None) -> Iterator[BaseException]:
    """Go from an error back to those that it was raised in the wake of, up to the one that the caller handles.

    Args:
        error: the error, if there is one.
        handled: what was raised before the call, if anything.

    Yields:
        The errors, the latest first.
    """
    while error is not None and error is not handled:
        yield error
        error = error.__context__


def _close_contexts(error: BaseException) -> None:
    """Close ``@contextmanager`` functions whose exit was interrupted: closed later, they would change a later call.

    Args:
        error: what was raised.
    """
    for frame in reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)]):
        if frame.f_code in _CONTEXTS:
            with suppress(Exception):  # what it restores may be restored already
                frame.f_locals["self"].gen.close()
