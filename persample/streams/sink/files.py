"""Files that are either whole or not there, and tensors as NumPy's format stores them."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from persample.errors import SinkError

_BLOCK = 2**24  # bytes that are read at a time


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


def write_whole(path: Path, data: bytes) -> None:
    """Write a file such that it is never seen half written, also after the process is killed.

    Args:
        path: the file, which is replaced if there is one.
        data: its content.
    """
    beside = unfinished(path)
    with beside.open("wb") as file:
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


def checksum(path: Path, start: int, length: int) -> int:
    """Return the CRC-32 of a part of a file."""
    crc = 0
    with path.open("rb") as file:
        file.seek(start)
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
