"""Dynamo's messages, cut down to what a user needs."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_TORCH = str(Path(torch.__file__).parent)


def failed_guard(reason: str) -> str:
    """Return the guard that failed, and the code that it guards.

    Args:
        reason: Dynamo's reason for a new capture, or an empty text.
    """
    first = (reason.splitlines() or [""])[0].partition(": ")[2]
    return re.sub(r"\s+", " ", first).strip()


def refusal(error: BaseException) -> str:
    """Return why Dynamo cannot capture a function, and in which line of the user's, without its stack and its advice.

    Args:
        error: Dynamo's error.
    """
    message = str(error)
    explanation = re.search(r"^ *Explanation: (.*)$", message, re.MULTILINE)
    said = explanation.group(1) if explanation else (message.strip() or type(error).__name__).splitlines()[0]
    return said + users_line(message)


def users_line(stack: str) -> str:
    """Return the user's last line in a stack, as the end of a message.

    Args:
        stack: a stack in the form of Python's tracebacks.
    """
    frames = re.findall(r'^ *File "(.*)", line (\d+), in (.*)\n *(.*)$', stack, re.MULTILINE)
    users = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    if not frames:
        return ""
    path, line, name, code = (users or frames)[-1]
    return f" In {name} ({path}:{line}): `{code}`"
