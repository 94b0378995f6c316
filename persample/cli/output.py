"""What all commands share: consoles, and folders that they may write to."""

from __future__ import annotations

import errno
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from persample.errors import ArgumentError


def console(*, stderr: bool = False) -> Console:
    """Return a console that is wide enough for tables where there is no terminal to ask."""
    return Console(stderr=stderr, width=None if (sys.stderr if stderr else sys.stdout).isatty() else 110)


def spelled(argument: str) -> str:
    """Return the option of an argument: ``--max-norm`` for ``max_norm``, ``--env`` for ``env_id``."""
    return f"--{argument.removesuffix('_id').rstrip('_').replace('_', '-')}"


def writable(directory: Path, *names: str) -> Path:
    """Make a directory, check that files with these names can be written to it, and return it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
        for name in names:
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(mode := (directory / name).lstat().st_mode):
                    kind = "a directory" if stat.S_ISDIR(mode) else "no plain file"
                    raise FileExistsError(errno.EEXIST, f"{name} is {kind}")
    except (OSError, ValueError) as error:
        fix = "Choose another one."
        reason = getattr(error, "strerror", error)  # a zero byte is a ValueError
        expected, received = "a directory that can be written to", f"{str(directory)!r} ({reason})"
        raise ArgumentError.about("--output", expected=expected, received=received, fix=fix) from error
    return directory
