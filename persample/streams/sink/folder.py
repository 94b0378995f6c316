"""A folder that results are written to: opened, committed batch by batch, finished; and read back.

Each of several processes has a folder of its own while they run; these are joined in data-set order when all are done.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from persample.errors import ArgumentError, SinkError
from persample.processes import Processes
from persample.streams.accumulator import Order
from persample.streams.sink.files import NAME, Column, Index, Record, altered, kept, opened, unfinished, write_whole
from persample.utils.trees import Tree

# A commit is due after this many times what the last one took, so that commits take at most a tenth of the time.
_PATIENCE = 10
_BLOCK = 2**16  # rows that are copied at a time


class Sink:
    """The files of one run of one process."""

    def __init__(self, folder: Path, asked: Record, *, resume: bool, among: Sequence[Path] = ()) -> None:
        self.folder = folder
        self._committed = self._took = 0.0
        exists = os.path.lexists(folder / NAME)
        if exists and not resume:
            index = Index.read(folder)
            held, fix = f"{index.batches} batches of a run", "Pass resume=True to go on with it, or another folder."
            if index.finished:
                held, fix = "the results of a run", "Read them by read_sink(folder), or pass another folder."
            raise _rejected("a new folder", f"{str(folder)!r} with {held}", fix)
        known = {*among, unfinished(folder / NAME)}  # by a run that was killed as it began
        if not exists and folder.is_dir() and not known.issuperset(folder.iterdir()):
            raise _rejected("a new folder, or one with results", f"{str(folder)!r} with other files", "Pass another.")
        self.index = Index.read(folder) if exists else Index(asked)
        other = [name for name in asked if asked[name] != self.index.asked.get(name)]
        if other:
            expected = f"the folder of a run with {other[0]} = {asked[other[0]]!r}"
            received = f"one with {self.index.asked.get(other[0])!r}"
            if other[0] == "params":  # a digest
                expected = "the folder of a run with these params"
                received = "one whose params had other names or values"
            raise _rejected(expected, received, "Pass the folder of this run, or a new one.")
        self.columns = {name: Column.of(folder, record) for name, record in self.index.rows.items()}
        if not self.index.finished:  # whoever reads finished results checks them
            for column in self.columns.values():
                column.check(whole=False)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not self.index.finished:
                self.index.write(folder)
            self._remove_all_but(self.index)
        except OSError as error:
            raise _unusable(folder, error) from error

    def append(self, rows: Mapping[str, Tensor]) -> None:
        """Write rows of more samples."""
        with kept(self.folder):
            for name, x in rows.items():
                if name not in self.columns:
                    path = self.folder / f"rows-{len(self.columns):04d}.npy"
                    self.columns[name] = Column(path, x.dtype, tuple(x.shape[1:]))
                self.columns[name].append(x)

    @property
    def is_due(self) -> bool:
        """Whether a commit is due."""
        return time.monotonic() - self._committed >= _PATIENCE * self._took

    def commit(self, batches: int, samples: int, weight: float, last_batch: str, state: Mapping[str, Tensor]) -> None:
        """Commit all appended rows: a run that is killed later resumes from here."""
        start = time.monotonic()
        buffer = io.BytesIO()
        arrays: Record = {name: x.cpu().numpy() for name, x in state.items()}
        np.savez(buffer, **arrays)
        data, name = buffer.getvalue(), f"sums-{batches:08d}.npz"
        self.index.batches, self.index.samples = batches, samples
        self.index.weight, self.index.last_batch = weight, last_batch
        self.index.checkpoint = {"file": name, "size": len(data), "crc32": zlib.crc32(data)}
        with kept(self.folder):
            for column in self.columns.values():
                column.flush()
            self.index.rows = {name: column.record for name, column in self.columns.items()}
            write_whole(self.folder / name, data)
            self.index.write(self.folder)
            self._remove_all_but(self.index)
        self._committed = time.monotonic()
        self._took = self._committed - start

    def state(self) -> dict[str, Tensor]:
        """Return the sums of the last commit."""
        record = self.index.checkpoint or {}
        path = self.folder / record["file"]
        with opened(path) as file:
            data = file.read()
        if len(data) != record["size"] or zlib.crc32(data) != record["crc32"]:
            expected = f"{record['size']} bytes of the checksum {record['crc32']}"
            raise altered(path, expected, f"{len(data)} bytes of another")
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        except ValueError as error:
            raise altered(path, "arrays of numbers", str(error)) from error

    def finish(self, samples: int, weight: float, values: Mapping[str, Tensor]) -> None:
        """Write the results without rows, and mark the run as finished."""
        with kept(self.folder):
            for column in self.columns.values():
                column.finish()
            for place, (name, x) in enumerate(values.items()):
                column = Column(self.folder / f"value-{place:04d}.npy", x.dtype, tuple(x.shape))
                column.append(x[None])
                column.finish()
                self.index.values[name] = column.record
            self.index.rows = {name: column.record for name, column in self.columns.items()}
            self.index.samples, self.index.weight = samples, weight
            self.index.checkpoint, self.index.finished = None, True
            self.index.write(self.folder)
            self._remove_all_but(self.index)

    def close(self) -> None:
        """Close the files."""
        for column in self.columns.values():
            column.close()

    def _remove_all_but(self, index: Index) -> None:
        """Remove checkpoints that the index does not name, and files that a kill left half written."""
        current = (index.checkpoint or {}).get("file")
        for path in (*self.folder.glob("sums-*.npz"), *self.folder.glob("*.tmp")):
            if path.name != current:
                path.unlink(missing_ok=True)  # all processes may open a finished folder


def named(folder: Tree) -> Path:
    """Return the argument ``sink`` as a path, at which there is a folder, or may be."""
    try:
        path = Path(folder)
        with suppress(FileNotFoundError):
            any(path.iterdir())
    except (OSError, TypeError, ValueError) as error:  # a name too long, a zero byte
        raise _unusable(folder, error) from error
    return path


def _unusable(folder: object, error: Exception) -> ArgumentError:
    received = f"{str(folder)!r} ({getattr(error, 'strerror', None) or error})"
    return _rejected("a folder that can be written to", received, "Choose another one.")


def _rejected(expected: str, received: str, fix: str) -> ArgumentError:
    return ArgumentError.about("sink", expected=expected, received=received, fix=fix)


def read_sink(folder: str | Path, *, verify: bool = True) -> dict[str, Tensor]:
    """Read the results that ``accumulate(..., sink=folder)`` has written.

    Nothing is unpickled. Tensors are memory-mapped, so unused ones are not read. Writes to them do not reach the files.

    Args:
        folder: the folder.
        verify: compare the checksums of the files, which reads all of them once. Sizes, dtypes and shapes are
            compared in any case.

    Returns:
        The tensors of the results by name: ``result`` for ``reduce=Norm()``, ``norms`` for ``{"norms": Norm()}``,
        ``rows.0.weight`` for rows of a parameter. Names that would be equal are written as Python expressions.

    Raises:
        SinkError: if the folder holds no finished results, or a file was altered; the message names it.

    Examples:
        >>> import tempfile, torch
        >>> from persample import Mean, Norm, accumulate, read_sink
        >>> folder, batches = tempfile.mkdtemp(), [torch.eye(2), 2 * torch.eye(2)]
        >>> wanted = {"mean": Mean(), "norms": Norm()}
        >>> results = accumulate(lambda w, x: w @ x, torch.zeros(2), batches, wanted, sink=folder)
        >>> read_sink(folder)
        {'mean': tensor([0.7500, 0.7500]), 'norms': tensor([1., 1., 2., 2.])}
    """
    results = read_results(Path(folder), verify=verify)
    short = {re.sub(r"\['?(.*?)'?\]", r".\1", name.removeprefix("result")).strip(".") or name: name for name in results}
    return {key: results[name] for key, name in short.items()} if len(short) == len(results) else results


def read_results(folder: Path, *, verify: bool) -> dict[str, Tensor]:
    """Return the tensors of a folder by the names of its index, as ``read_sink`` checks them."""
    index = Index.read(folder)
    if not index.finished:
        raise SinkError(
            f"sink: {str(folder)!r} holds {index.batches} batches of a run that has not ended. Call accumulate with "
            "the same arguments and resume=True."
        )
    results = {}
    for name, record in {**index.values, **index.rows}.items():
        column = Column.of(folder, record)
        column.check(contents=verify)
        results[name] = column.mapped() if name in index.rows else column.mapped()[0]
    return results


def open_own(folder: Path, asked: Record, order: Order, processes: Processes, *, resume: bool) -> Sink:
    """Open the folder that a process writes to, or the one that all have finished."""
    if processes.group is None or (os.path.lexists(folder / NAME) and Index.read(folder).finished):
        whole = Sink(folder, asked, resume=resume)
        if not processes.rank:
            _remove(folder.glob("rank-*-of-*"))
        return whole
    path = folder / f"rank-{processes.rank:05d}-of-{processes.size:05d}"
    if path.is_symlink():
        raise altered(path, "a folder", "a link")
    return Sink(path, {**asked, "rank": [processes.rank, processes.size, order]}, resume=resume)


def join_ranks(folder: Path, asked: Record, order: Order, processes: Processes, values: Mapping[str, Tensor]) -> None:
    """Write the rows of all processes to the folder of the run, on the first process; remove their own folders."""
    if processes.rank:
        return
    parts = [folder / f"rank-{rank:05d}-of-{processes.size:05d}" for rank in range(processes.size)]
    indices = [Index.read(part) for part in parts]
    whole = Sink(folder, asked, resume=True, among=parts)
    for name in {name: None for index in indices for name in index.rows}:
        found = [(part, index.rows.get(name)) for part, index in zip(parts, indices, strict=True)]
        rows = [Column.of(part, record).mapped() for part, record in found if record is not None]
        for block in _in_order(rows, order):
            whole.append({name: block})
    whole.finish(sum(index.samples for index in indices), sum(index.weight for index in indices), values)
    _remove(parts)


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        with kept(folder):
            shutil.rmtree(folder)


def _in_order(rows: Sequence[Tensor], order: Order) -> Iterator[Tensor]:
    """Yield the rows of all processes in the order of the data set, in blocks."""
    if order == "contiguous":
        for own in rows:
            yield from own.split(_BLOCK)
        return
    for start in range(0, max(map(len, rows)), _BLOCK):
        parts = [own[start : start + _BLOCK] for own in rows]
        block = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
        for rank, part in enumerate(parts):
            block[rank :: len(rows)] = part
        yield block
