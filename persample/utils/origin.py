"""Whose error it is: one of the user's own code, or one of torch or of this library."""

from __future__ import annotations

import dis
import os
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from persample.utils.flags import flags

OURS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_RAISE = dis.opmap["RAISE_VARARGS"]


def is_users(error: BaseException) -> bool:
    """Return whether an error is the user's own, so that nothing else would come of another call.

    It is, if a statement outside of torch and of this library raised it, or Python did there (a key that is missing).
    Not if torch did when it was called from there, nor if it was raised because of an error that is not the user's.

    Args:
        error: what was raised.

    Examples:
        >>> def error_of(function):
        ...     try:
        ...         function()
        ...     except Exception as error:
        ...         return error
        >>> is_users(error_of(lambda: {}["missing"])), is_users(error_of(lambda: torch.ones(2) @ torch.ones(3)))
        (True, False)
    """
    return all(map(_is_users, raised(error, getattr(flags, "handled", None))))


def raised(error: BaseException | None, handled: BaseException | None) -> Iterator[BaseException]:
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


def _is_users(error: BaseException) -> bool:
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames or frames[-1][0].f_code.co_filename.startswith(OURS):
        return False
    return not isinstance(error, RuntimeError | Warning) or _is_raised(error)


def _is_raised(error: BaseException) -> bool:
    """Return whether a ``raise`` statement raised an error, and not what it called."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is not None and tb.tb_frame.f_code.co_code[tb.tb_lasti] == _RAISE
