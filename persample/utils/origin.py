"""The origin of an error: the user's own code, or torch and this library."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch

from persample.errors import ArgumentError, LossError

LIBRARY = f"{Path(__file__).parents[1]}{os.sep}"
OURS = (f"{Path(torch.__file__).parent}{os.sep}", LIBRARY)
_AUTOGRAD = f"{OURS[0]}autograd{os.sep}"
_AROUND = (*OURS, contextlib.__file__)  # what may call the user's code


def is_users(error: BaseException, handled: BaseException | None) -> bool:
    """Return whether an error is the user's own, so that calling the loss in another way would raise it again.

    An error is the user's if code outside of torch and of this library raised it, on purpose or by an operation of
    Python (a missing key). It is not the user's if torch raised it when the user's code called torch, or if it was
    raised while an error that is not the user's was handled. ``handled`` is ``sys.exc_info()[1]`` before the ``try``,
    here and in all functions below.

    Examples:
        >>> def error_of(function):
        ...     try:
        ...         function()
        ...     except Exception as error:
        ...         return error
        >>> wrong = error_of(lambda: {}["missing"]), error_of(lambda: torch.nn.Linear(2, 3)(torch.ones(3)))
        >>> [is_users(error, None) for error in wrong]
        [True, False]
    """
    return all(map(is_raised, raised_since(handled, error)))


def frames() -> Iterator[FrameType]:
    """Yield the frames that run, from the caller's own to the outermost."""
    frame = inspect.currentframe()
    return (outer for outer, _ in traceback.walk_stack(frame and frame.f_back))


def is_ours(frame: FrameType) -> bool:
    """Return whether a frame is one of torch or of this library."""
    return frame.f_code.co_filename.startswith(OURS)


def users_depth() -> int:
    """Return the ``stacklevel`` by which a warning of the caller's names the user's line that called the library."""
    return len(list(itertools.takewhile(is_ours, frames())))


def user_line(stack: traceback.StackSummary) -> str:
    """Return the innermost line that belongs neither to torch nor to this library."""
    frame = next((frame for frame in reversed(stack) if not frame.filename.startswith(OURS)), None)
    if frame is None:
        return ""
    return f", in {frame.name} ({frame.filename}:{frame.lineno}): `{(frame.line or '').strip()}`"


def fold(error: BaseException, handled: BaseException | None) -> None:
    """Take the frames before the user's own out of the traceback of an error, and of those that led to it.

    What stays is the user's code and the functions of torch that it calls; of an error that this library raises on
    purpose, the user's call. A traceback of a fault of ours stays as it is.
    """
    on_purpose = isinstance(error, ArgumentError | LossError)
    for link in raised_since(handled, error):
        frames, tb = list[TracebackType](), link.__traceback__
        while tb is not None:
            frames.append(tb)
            tb = tb.tb_next
        files = [frame.tb_frame.f_code.co_filename for frame in frames]
        if not frames:
            continue
        first = next((place for place, file in enumerate(files) if not file.startswith(_AROUND)), len(frames))
        passed_on = not files[-1].startswith(LIBRARY) or frames[-1].tb_frame.f_code.co_name == "__torch_function__"
        if (first < len(frames) and (on_purpose or passed_on)) or isinstance(link, ArgumentError | LossError):
            for frame, file in reversed(list(zip(frames, files, strict=True))[first:]):
                if not file.startswith(LIBRARY):
                    tb = TracebackType(tb, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
            link.__traceback__ = tb


def raised_since(handled: BaseException | None, error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those whose handling raised it, the latest first, as Python links them."""
    while error is not None and error is not handled:
        yield error
        error = error.__context__


def is_raised(error: BaseException) -> bool:
    """Return whether code outside of torch and of this library raised an error.

    Engines call losses under modes, so that the frames of what torch raises there end in torch or here. Warnings count
    as torch's. So does a ``RuntimeError`` where no mode is active: in code that autograd calls, and of
    ``autograd.Function.apply``, which torch 2.15 has in C.
    """
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not files or files[-1].startswith(OURS) or isinstance(error, Warning):
        return False
    if not isinstance(error, RuntimeError):
        return True
    return not any(file.startswith(_AUTOGRAD) for file in files) and "setup_context staticmethod" not in str(error)
