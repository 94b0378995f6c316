"""The folders of several processes: one for each while they run, joined in data-set order when all are done."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from persample.processes import Processes
from persample.streams.ranks import Order
from persample.streams.sink.column import Column
from persample.streams.sink.files import altered, kept
from persample.streams.sink.folder import Sink
from persample.streams.sink.index import NAME, Index

_BLOCK = 2**16  # rows that are copied at a time


def open_own(folder: Path, asked: dict[str, Any], order: Order, processes: Processes, *, resume: bool) -> Sink:
    """Open the folder that a process writes to, or the one that all have finished.

    Args:
        folder: the folder of the run.
        asked: what is computed.
        order: how the data set is spread over the processes.
        processes: the processes.
        resume: whether to go on with the run in the folder.

    Returns:
        The folder of this process; that of the run if there is only one process, or if all is done.
    """
    if processes.group is None or (os.path.lexists(folder / NAME) and Index.read(folder).finished):
        whole = Sink(folder, asked, resume=resume)
        if not processes.rank:
            _remove(folder.glob("rank-*-of-*"))
        return whole
    path = folder / f"rank-{processes.rank:05d}-of-{processes.size:05d}"
    if path.is_symlink():
        raise altered(path, "a folder", "a link")
    return Sink(path, {**asked, "rank": [processes.rank, processes.size, order]}, resume=resume)


def join(folder: Path, asked: dict[str, Any], order: Order, processes: Processes, values: Mapping[str, Tensor]) -> None:
    """Write the rows of all processes to the folder of the run, on the first process; remove their own folders.

    Args:
        folder: the folder of the run.
        asked: what is computed.
        order: how the data set is spread over the processes.
        processes: the processes, which have closed their files.
        values: the results that are no rows.
    """
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
