"""Files that are either whole or not there, and tensors as NumPy's format stores them."""

from __future__ import annotations

import errno
import io
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from persample.errors import SinkError

_BLOCK = 2**24  # bytes that are read at a time
_NO_FILE = {errno.ELOOP, errno.EISDIR, errno.ENXIO, None}  # from opening a link, a directory, a socket, a pipe
# The dtypes that NumPy has, and bfloat16.
DTYPES = {"bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16"}
DTYPES |= {"float32", "float64", "complex64", "complex128"}
# No link is followed, and no pipe is waited for.
_GUARDED = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@contextmanager
def kept(folder: Path) -> Iterator[None]:
    """Explain errors of the disk.

    Args:
        folder: the folder that is written to.

    Raises:
        SinkError: instead of an ``OSError``.
    """
    try:
        yield
    except OSError as error:
        raise SinkError(
            f"sink: {str(folder)!r} could not be written to ({error.strerror or error}). What was committed before is "
            "whole: make room, and call again with resume=True."
        ) from error


def opened(path: Path, mode: str = "rb") -> BinaryIO:
    """Open a file, where others may have put a link or a pipe: that is an error; "w+b" keeps what the file holds."""
    try:
        file = cast("BinaryIO", open(path, mode, opener=_guarded))  # noqa: SIM115
    except OSError as error:
        if mode != "rb" and error.errno not in _NO_FILE:
            raise
        raise altered(path, "a plain file", str(error.strerror)) from error
    facts = os.fstat(file.fileno())
    if not stat.S_ISREG(facts.st_mode) or (mode != "rb" and facts.st_nlink > 1):
        file.close()
        raise altered(path, "a plain file of one name", "a device, a pipe or a hard link")
    return file


def _guarded(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_TRUNC | _GUARDED, 0o666)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file such that it is never seen half written, also after the process is killed.

    Args:
        path: the file, which is replaced if there is one.
        data: its content.
    """
    beside = unfinished(path)
    with opened(beside, "w+b") as file:
        file.truncate()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def unfinished(path: Path) -> Path:
    """Return the file that ``write_whole`` leaves behind if the process is killed in it."""
    return path.with_name(f"{path.name}.tmp")


def header(x: np.ndarray[Any, Any], count: int) -> bytes:
    """Return the header of an ``.npy`` file of rows like those of an array; its length is the same for any number."""
    buffer = io.BytesIO()
    facts = {"descr": np.lib.format.dtype_to_descr(x.dtype), "fortran_order": False, "shape": (count, *x.shape[1:])}
    np.lib.format.write_array_header_1_0(buffer, facts)
    return buffer.getvalue()


def as_tensor(x: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    """Return an array as a tensor of the dtype that it was made from."""
    return torch.from_numpy(x).view(dtype) if dtype == torch.bfloat16 else torch.from_numpy(x)


def checksum(file: BinaryIO, length: int) -> int:
    """Return the CRC-32 of the next bytes of a file."""
    crc = 0
    while length > 0 and (block := file.read(min(_BLOCK, length))):
        crc = zlib.crc32(block, crc)
        length -= len(block)
    return crc


def altered(path: Path, expected: str, received: str) -> SinkError:
    """Return the error about a file that is not what was written."""
    return SinkError(
        f"sink: {str(path)!r} was altered or cut short: expected {expected}, received {received}. Restore the file, "
        "or remove the folder and compute it again."
    )
