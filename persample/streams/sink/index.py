"""The index of a folder of results: which files it has, and how much of them is whole."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from persample.errors import SinkError
from persample.streams.sink.files import write_whole

NAME = "index.json"
_FORMAT = "persample results 1"


@dataclass
class Index:
    """What ``index.json`` says.

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
        text = json.dumps(asdict(self), indent=1)
        write_whole(folder / NAME, f"{text}\n".encode())

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Return the index of a folder.

        Raises:
            SinkError: if it is no such index.
        """
        path, fix = folder / NAME, "Pass a folder that accumulate(sink=…) has written."
        try:
            index = cls(**json.loads(path.read_text(encoding="utf-8")))
            records = [*index.rows.values(), *index.values.values()]
            names = [record[key] for record in records for key in ("file", "dtype", "shape", "count", "crc32")][::5]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SinkError(
                f"sink: {str(path)!r} is no index of results ({type(error).__name__}: {error}). {fix}"
            ) from error
        if index.format != _FORMAT or any(Path(name).name != name for name in names):
            raise SinkError(f"sink: {str(path)!r} is of another version, or names files elsewhere: {names}. {fix}")
        return index
