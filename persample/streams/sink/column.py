"""One growing ``.npy`` file of rows, one row per sample."""

from __future__ import annotations

import math
import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from persample.streams.sink.files import altered, as_tensor, checksum, header, opened
from persample.utils.trees import as_array


class Column:
    """The rows of one tensor of the results.

    Args:
        path: the file.
        dtype: the dtype of the rows.
        shape: the shape of one row.
        count: how many rows are known to be whole; those after them are cut off.
        crc: the CRC-32 of these rows.

    Raises:
        SinkError: if the file does not hold these rows.
    """

    def __init__(self, path: Path, dtype: torch.dtype, shape: tuple[int, ...], count: int = 0, crc: int = 0) -> None:
        self.path, self.dtype, self.shape, self.count, self.crc = path, dtype, shape, count, crc
        self._like = as_array(torch.empty(0, *shape, dtype=dtype, device="cpu"))
        self._start = len(header(self._like, 0))
        self._file: BinaryIO | None = None

    @classmethod
    def of(cls, folder: Path, record: dict[str, Any]) -> Column:
        """Return the column that a record of the index describes."""
        dtype = getattr(torch, record["dtype"])
        return cls(folder / record["file"], dtype, tuple(record["shape"]), record["count"], record["crc32"])

    @property
    def record(self) -> dict[str, Any]:
        """What the index says of the column."""
        dtype = str(self.dtype).removeprefix("torch.")
        facts = {"file": self.path.name, "dtype": dtype, "shape": list(self.shape)}
        return {**facts, "count": self.count, "crc32": self.crc}

    @property
    def _length(self) -> int:
        return self.count * self._like.dtype.itemsize * math.prod(self.shape)

    def append(self, rows: Tensor) -> None:
        """Write more rows.

        Args:
            rows: ``[n, *shape]``.
        """
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
        """Compare the file with the record.

        Args:
            whole: whether the file is finished: it has its header, and ends after the recorded rows.
            contents: whether to compare the checksum of the rows.

        Raises:
            SinkError: if it differs.
        """
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
