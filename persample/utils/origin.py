"""The origin of an error: the user's own code, or torch and this library."""

from __future__ import annotations

import dis
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

OURS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_RAISE = dis.opmap["RAISE_VARARGS"]


def handled_error() -> BaseException | None:
    """Return the error whose ``except`` or ``finally`` block runs in this thread, if one does.

    Python links every error raised in that block to the handled one. Read the handled error before a ``try``, to tell
    the errors of the ``try`` from it.
    """
    return sys.exc_info()[1]


def is_users(error: BaseException, handled: BaseException | None) -> bool:
    """Return whether an error is the user's own, so that calling the loss in another way would raise it again.

    An error is the user's if code outside of torch and of this library raised it, by a ``raise`` statement or by an
    operation of Python (a missing key). It is not the user's if torch raised it when the user's code called torch, or
    if it was raised while an error that is not the user's was handled.

    Args:
        error: the error.
        handled: ``handled_error()`` before the ``try``.

    Examples:
        >>> def error_of(function):
        ...     try:
        ...         function()
        ...     except Exception as error:
        ...         return error
        >>> wrong = error_of(lambda: {}["missing"]), error_of(lambda: torch.ones(2) @ torch.ones(3))
        >>> [is_users(error, None) for error in wrong]
        [True, False]
    """
    return all(map(_is_users, raised_since(handled, error)))


def raised_since(handled: BaseException | None, error: BaseException | None) -> Iterator[BaseException]:
    """Follow an error back to the errors that were handled when it was raised.

    Args:
        handled: the error to stop at: ``handled_error()`` before the ``try``.
        error: the error to start from, or None.

    Yields:
        The errors, the latest first.
    """
    while error is not None and error is not handled:
        yield error
        error = error.__context__


def _is_users(error: BaseException) -> bool:
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames or frames[-1][0].f_code.co_filename.startswith(OURS):
        return False
    return not isinstance(error, RuntimeError | Warning) or _is_raised(error)


def _is_raised(error: BaseException) -> bool:
    """Return whether a ``raise`` statement raised an error, rather than a function called in that line."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is not None and tb.tb_frame.f_code.co_code[tb.tb_lasti] == _RAISE
