"""The index of a folder of results: which files it has, and how much of them is whole."""

from __future__ import annotations

import errno
import json
import math
import os
import reprlib
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from persample.errors import SinkError
from persample.streams.sink.files import DTYPES, opened, write_whole

NAME = "index.json"
_FORMAT = "persample results 2"
_SEAL = b',\n "crc32": '  # what stands before the checksum, the last field


@dataclass
class Index:
    """What ``index.json`` says, beside its own checksum.

    Args:
        asked: what was computed: parameters, reductions, options.
        batches: how many batches are whole; 0 of the results of several processes.
        samples: how many samples they had.
        weight: the sum of the samples' weights.
        last_batch: a checksum of the last of them, with its weights.
        rows: for each tensor with rows of samples, its file, dtype, shape of a row, number of rows and checksum.
        values: the same for each tensor that is one result for all samples.
        checkpoint: the file with the sums so far and its checksum; None when all is done.
        finished: whether all is done.
        format: the version of this format.
    """

    asked: dict[str, Any]
    batches: int = 0
    samples: int = 0
    weight: float = 0.0
    last_batch: str = ""
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    checkpoint: dict[str, Any] | None = None
    finished: bool = False
    format: str = _FORMAT

    def write(self, folder: Path) -> None:
        """Replace the index of a folder, at once."""
        body = json.dumps(asdict(self), indent=1).encode().removesuffix(b"\n}")
        write_whole(folder / NAME, body + _seal(body))

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Return the index of a folder.

        Raises:
            SinkError: if it is no such index.
        """
        path = folder / NAME
        try:
            found = _parsed(path)
        except (OSError, ValueError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            fix = "Pass a folder that accumulate(sink=…) has written. numpy.load reads its .npy files without an index."
            raise SinkError(f"sink: {str(path)!r} is no index of results ({reason}). {fix}") from error
        return cls(**found)


def _parsed(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    with opened(path) as file:
        data = file.read()
    body = data[: max(data.rfind(_SEAL), 0)]
    if data != body + _seal(body):
        raise ValueError("its checksum is not that of its contents: altered, cut short, or of an older version")
    found: dict[str, Any] = json.loads(data)
    del found["crc32"]
    _check(found)
    return found


def _seal(body: bytes) -> bytes:
    """Return the end of an index, with the checksum of all that comes before."""
    return _SEAL + b"%d\n}\n" % zlib.crc32(body)


def _check(index: dict[str, Any]) -> None:
    """Reject an index with other fields, or other values in them, than are written."""
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


def _check_fields(found: Any, types: dict[str, type], file: str | None = None) -> None:
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
