"""Files that are either whole or not there: growing ``.npy`` files of rows, one a sample, and the index of a folder."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import reprlib
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from persample.errors import SinkError
from persample.utils.trees import Tree, as_array

Record: TypeAlias = dict[str, Any]  # an object of JSON

_BLOCK = 2**24  # bytes that are read at a time
_NO_FILE = {errno.ELOOP, errno.EISDIR, errno.ENXIO, None}  # from opening a link, a directory, a socket, a pipe
# The dtypes that NumPy has, and bfloat16.
DTYPES = {"bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16"}
DTYPES |= {"float32", "float64", "complex64", "complex128"}
# No link is followed, and no pipe is waited for.
_GUARDED = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@contextmanager
def kept(folder: Path) -> Iterator[None]:
    """Explain errors of the disk."""
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
    """Replace a file at once: a process that is killed leaves the old file or the new one."""
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


def header(x: NDArray[np.generic], count: int) -> bytes:
    """Return the header of an ``.npy`` file of rows like those of an array; its length is the same for any number."""
    buffer = io.BytesIO()
    facts = {"descr": np.lib.format.dtype_to_descr(x.dtype), "fortran_order": False, "shape": (count, *x.shape[1:])}
    np.lib.format.write_array_header_1_0(buffer, facts)
    return buffer.getvalue()


def as_tensor(x: NDArray[np.generic], dtype: torch.dtype) -> Tensor:
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


class Column:
    """The rows of one tensor of the results."""

    def __init__(self, path: Path, dtype: torch.dtype, shape: tuple[int, ...], count: int = 0, crc: int = 0) -> None:
        self.path, self.dtype, self.shape, self.count, self.crc = path, dtype, shape, count, crc
        self._like = as_array(torch.empty(0, *shape, dtype=dtype, device="cpu"))
        self._start = len(header(self._like, 0))
        self._file: BinaryIO | None = None

    @classmethod
    def of(cls, folder: Path, record: Record) -> Column:
        """Return the column that a record of the index describes."""
        dtype = getattr(torch, record["dtype"])
        return cls(folder / record["file"], dtype, tuple(record["shape"]), record["count"], record["crc32"])

    @property
    def record(self) -> Record:
        """What the index says of the column."""
        dtype = str(self.dtype).removeprefix("torch.")
        facts = {"file": self.path.name, "dtype": dtype, "shape": list(self.shape)}
        return {**facts, "count": self.count, "crc32": self.crc}

    @property
    def _length(self) -> int:
        return self.count * self._like.dtype.itemsize * math.prod(self.shape)

    def append(self, rows: Tensor) -> None:
        """Write more rows."""
        if self._file is None:
            self._file = self._opened()
        data = as_array(rows).tobytes()
        self._file.write(data)
        self.crc = zlib.crc32(data, self.crc)
        self.count += len(rows)

    def _opened(self) -> BinaryIO:
        file = opened(self.path, "w+b")
        file.truncate(self._start + self._length)  # what came after the last commit is computed again
        file.seek(self._start + self._length)
        return file

    def flush(self) -> None:
        """Let the rows reach the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; what a full disk does not take of it was not committed."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def finish(self) -> None:
        """Write the header, with which the file is an ordinary ``.npy`` file, and close it."""
        if self._file is None:
            self._file = self._opened()
        self._file.seek(0)
        self._file.write(header(self._like, self.count))
        self.flush()
        self.close()

    def check(self, *, whole: bool = True, contents: bool = True) -> None:
        """Compare the file with the record."""
        expected = self._start + self._length
        with opened(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < expected or (whole and size > expected):
                raise altered(self.path, f"{expected} bytes", f"{size}")
            if file.read(self._start) != header(self._like, self.count) and whole:
                rows = f"{self.count} rows of shape {list(self.shape)}, {self.dtype}"
                raise altered(self.path, rows, "another header")
            if contents and (crc := checksum(file, self._length)) != self.crc:
                raise altered(self.path, f"the checksum {self.crc}", f"{crc}")

    def mapped(self) -> Tensor:
        """Return the rows of a finished file, mapped into memory; writes to the tensor do not reach the file."""
        shape = (self.count, *self.shape)
        if not self._length:
            return torch.empty(shape, dtype=self.dtype, device="cpu")
        with opened(self.path) as file:
            memory = np.memmap(file, self._like.dtype, mode="c", offset=self._start, shape=shape)
        return as_tensor(memory, self.dtype)


NAME = "index.json"
_FORMAT = "persample results 2"
_SEAL = b',\n "crc32": '  # what stands before the checksum, the last field


@dataclass
class Index:
    """What ``index.json`` says, beside its own checksum."""

    asked: Record  # what was computed: parameters, reductions, options
    batches: int = 0  # how many batches are whole; 0 of the results of several processes
    samples: int = 0  # how many samples they had
    weight: float = 0.0  # the sum of the samples' weights
    last_batch: str = ""  # a checksum of the last of them, with its weights
    # for each tensor with rows of samples, its file, dtype, shape of a row, number of rows and checksum
    rows: dict[str, Record] = field(default_factory=dict)
    values: dict[str, Record] = field(default_factory=dict)  # the same for each result for all samples
    checkpoint: Record | None = None  # the file with the sums so far and its checksum; None when all is done
    finished: bool = False
    format: str = _FORMAT

    def write(self, folder: Path) -> None:
        """Replace the index of a folder, at once."""
        body = json.dumps(asdict(self), indent=1).encode().removesuffix(b"\n}")
        write_whole(folder / NAME, body + _seal(body))

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Return the index of a folder."""
        path = folder / NAME
        try:
            found = _parsed(path)
        except (OSError, ValueError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            fix = "Pass a folder that accumulate(sink=…) has written. numpy.load reads its .npy files without an index."
            raise SinkError(f"sink: {str(path)!r} is no index of results ({reason}). {fix}") from error
        return cls(**found)


def _parsed(path: Path) -> Record:
    if not os.path.lexists(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    with opened(path) as file:
        data = file.read()
    body = data[: max(data.rfind(_SEAL), 0)]
    if data != body + _seal(body):
        raise ValueError("its checksum is not that of its contents: altered, cut short, or of an older version")
    found: Record = json.loads(data)
    del found["crc32"]
    _check(found)
    return found


def _seal(body: bytes) -> bytes:
    """Return the end of an index, with the checksum of all that comes before."""
    return _SEAL + b"%d\n}\n" % zlib.crc32(body)


def _check(index: Record) -> None:
    """Reject an index with fields or values that this version does not write."""
    _check_fields(index, _INDEX | {"checkpoint": type(index.get("checkpoint"))})
    is_over, values = index["finished"] or not index["batches"], index["values"].values()
    if index["format"] != _FORMAT or not math.isfinite(index["weight"]) or is_over != (index["checkpoint"] is None):
        raise ValueError(f"expected {_FORMAT!r}, a finite weight, and a checkpoint until all is done")
    if not is_over:
        _check_fields(index["checkpoint"], _CHECKPOINT, f"sums-{index['batches']:08d}.npz")
    for prefix, records in (("rows", index["rows"].values()), ("value", values)):
        for place, record in enumerate(records):
            _check_fields(record, _COLUMN, f"{prefix}-{place:04d}.npy")
    if any(record["count"] != 1 for record in values):
        raise ValueError("expected one result for all samples")


def _check_fields(found: Tree, types: dict[str, type], file: str | None = None) -> None:
    """Reject anything but a dict of these types, the file with this name, and sizes that a tensor may have."""
    kinds = {name: type(x) for name, x in found.items()} if isinstance(found, dict) else type(found)
    if kinds != types:
        raise ValueError(f"expected fields {types}, received {reprlib.repr(kinds)}")
    numbers, shape = [x for x in found.values() if type(x) is int], found.get("shape", [])
    sizes = [max(x, 1) if type(x) is int and x >= 0 else 0 for x in (*shape, found.get("count", 0))]
    if min(numbers) < 0 or not 0 < math.prod(sizes) < 2**59 or len(sizes) > 64:
        raise ValueError(f"expected sizes of tensors, received {reprlib.repr(found)}")
    if found.get("file") != file or found.get("dtype", "bool") not in DTYPES:
        raise ValueError(f"expected the file {file!r} of a dtype of NumPy's, received {reprlib.repr(found)}")


_INDEX = {"asked": dict, "batches": int, "samples": int, "weight": float, "last_batch": str, "rows": dict}
_INDEX |= {"values": dict, "finished": bool, "format": str}
_COLUMN = {"file": str, "dtype": str, "shape": list, "count": int, "crc32": int}
_CHECKPOINT = {"file": str, "size": int, "crc32": int}
