"""Units in a stream: the last unit of a batch waits, as the next batch may have more of its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.inputs.call import Call, with_units
from persample.inputs.units import Ids, UnitReduce, as_ids, is_count
from persample.processes import Processes
from persample.reductions import Reduction
from persample.streams.batches import Batch
from persample.utils import trees
from persample.utils.trees import Leaf


class UnitStream:
    """The units of one call of ``accumulate``; if ``waits``, the last unit of a batch may continue in the next one."""

    def __init__(self, reduce: UnitReduce, wanted: Sequence[Reduction], *, waits: bool) -> None:
        self.reduce, self.wanted, self.waits = reduce, wanted, waits
        self.done: set[int] = set()
        self._held: tuple[Call, Leaf] | None = None

    def is_whole(self, batch: Batch) -> bool:
        """Return whether a batch has no units, or whole ones, and no samples wait for it."""
        if batch.unit is None:
            return True
        leaves = [x for x in trees.flatten(batch.content)[0] if isinstance(x, Tensor) and x.ndim]
        return self._held is None and is_count(batch.unit) and all(len(x) % batch.unit == 0 for x in leaves)

    def whole(self, call: Call, unit: Leaf) -> list[Call]:
        """Return the samples of whole units, of those that wait and those of a batch; apart where they do not fit."""
        if unit is None or (is_count(unit) and not self.waits):
            return [call if unit is None else self._of_units(call, unit)]
        ids = unit if isinstance(unit, int) else as_ids(unit, call.size)
        ready: list[Call] = []
        if self._held is not None:
            before, of_before = self._held
            misfit = _misfit(before, call)
            continues = isinstance(ids, int) or of_before[0] in ids
            if misfit and continues:
                fix = "Begin a batch with a new unit where it changes, or pad the batches to one size."
                expected = f"{misfit} to be the same in all batches of a unit"
                raise ArgumentError.about("unit", expected=expected, received="another", fix=fix)
            if misfit:
                ready = [self._last(before, of_before)]
            else:
                call = _joined(before, call)
                ids = ids if isinstance(ids, int) else np.concatenate([of_before, ids])
        waiting = self._unfinished(ids, call.size)
        self._held = None
        if waiting.any():
            self._held = _some(call, ids, waiting)
            call, ids = _some(call, ids, ~waiting)
        return [*ready, self._of_units(call, ids)]

    def rest(self) -> Call | None:
        """Return the samples of the last unit."""
        if self._held is None:
            return None
        call, unit = self._held
        if isinstance(unit, int):
            expected = "a divisor of the number of samples in all batches"
            fix = "Leave the last samples out, or pass the ids of the samples' units."
            raise ArgumentError.about("unit", expected=expected, received=f"{unit}, which leaves {call.size}", fix=fix)
        return self._last(call, unit)

    def _last(self, call: Call, ids: Ids) -> Call:
        self.done.add(int(ids[0]))
        return self._of_units(call, ids)

    def _of_units(self, call: Call, unit: int | Ids) -> Call:
        return with_units(call, unit, self.reduce, self.wanted)

    def check_ranks(self, processes: Processes) -> None:
        """Reject units whose samples several processes have."""
        if processes.group is None:
            return
        owners: dict[int, int] = {}
        for rank, ids in enumerate(processes.gather_objects(self.done)):
            shared = sorted(ids & owners.keys())
            if shared:
                received = f"id {shared[0]} on ranks {owners[shared[0]]} and {rank}"
                fix = "Give each process the samples of its own units."
                raise ArgumentError.about("unit", expected="units of one process each", received=received, fix=fix)
            owners |= dict.fromkeys(ids, rank)

    def _unfinished(self, unit: int | Ids, size: int) -> Tensor:
        """Return which samples wait, ``[B]`` bool; remember the units of the others."""
        if isinstance(unit, int):
            return torch.arange(size, device="cpu") >= size - size % unit
        found, first = np.unique(unit, return_index=True)
        waiting = np.zeros(size, dtype=np.bool_)
        if self.waits and size:
            waiting = np.equal(unit, unit[first.max()])
        again = sorted(self.done.intersection(found.tolist()))
        if again:
            place = "one batch, or in consecutive ones, as its last unit" if self.waits else "one batch"
            expected = f"all samples of a unit in {place}"
            received = f"id {again[0]} again, after other units"
            fix = "Sort the samples by their units."
            raise ArgumentError.about("unit", expected=expected, received=received, fix=fix)
        self.done.update(unit[~waiting].tolist())
        return torch.from_numpy(waiting)


def _some(call: Call, unit: int | Ids, chosen: Tensor) -> tuple[Call, int | Ids]:
    """Return some samples, in memory of their own, and their units."""
    index = chosen.nonzero()[:, 0].to(call.params[0].device)
    params, leaves = call.at(index)
    weights = None if call.weights is None else call.weights[index]
    call = replace(call, size=len(index), params=params, leaves=leaves, weights=weights)
    return call, unit if isinstance(unit, int) else unit[chosen.numpy()]


def _misfit(before: Call, call: Call) -> str:
    """Return what keeps the samples of two batches from being one batch, or ""."""
    if before.loss.batch != call.loss.batch or before.leaves_batched != call.leaves_batched:
        return "the structure of the samples"
    if (before.weights is None) != (call.weights is None):
        return "whether there are weights"
    for x, y, split in zip(before.leaves, call.leaves, call.leaves_batched, strict=True):
        if split and (x.shape[1:], x.dtype) != (y.shape[1:], y.dtype):
            return "the shape of a sample"
        if not split and not _is_same(x, y):
            return "what all samples share"
    return ""


def _is_same(one: Leaf, other: Leaf) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other or bool(one == other)
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _joined(before: Call, call: Call) -> Call:
    """Return the samples of both, which share what they share."""

    def both(one: Sequence[Leaf], other: Sequence[Leaf], batched: Sequence[bool]) -> tuple[Leaf, ...]:
        return tuple(torch.cat([x, y]) if split else y for x, y, split in zip(one, other, batched, strict=True))

    weights = [x.weights for x in (before, call) if x.weights is not None]
    return replace(
        call,
        size=before.size + call.size,
        params=both(before.params, call.params, call.params_batched),
        leaves=both(before.leaves, call.leaves, call.leaves_batched),
        weights=torch.cat(weights) if weights else None,
    )
