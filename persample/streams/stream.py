"""One pass over the batches: each is lifted and merged; then the processes are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from persample.inputs import Call, check_params
from persample.inputs.call import NotConnectedError
from persample.processes import Processes
from persample.streams.accumulator import Accumulator, Order, Partial, merge_ranks
from persample.streams.batches import Batch, no_batch
from persample.streams.lift import BatchLift
from persample.streams.sink import SinkRun
from persample.utils.trees import Tree

T = TypeVar("T")


class Stream:
    """One call of ``accumulate``."""

    def __init__(self, lift: BatchLift, order: Order, processes: Processes, run: SinkRun | None) -> None:
        self.lift, self.order, self.processes, self.run = lift, order, processes, run
        self.accumulator = Accumulator()
        self._batch: Batch | None = None

    def through(self, batches: Iterator[Batch], advance: Callable[[int], object]) -> None:
        """Go through the batches of this process."""
        self.lift.random.seed(self.processes)
        try:
            self._add_all(batches, advance)
            self.processes.together(self._end)
        finally:
            if self.run is not None:
                self.run.close()

    def merged(self) -> Partial:
        """Merge the results of all processes."""
        self.lift.units.check_ranks(self.processes)
        own = self.accumulator.partial()
        with self.processes.answered():
            total = merge_ranks(own, self.lift.wanted, self.order, self.processes)
        if total.leaves is None:
            check_params(self.lift.params)
            raise no_batch()
        total.weight.check(self.lift.wanted)
        if total.count and not total.leaves[1].value:
            raise NotConnectedError
        return total

    def _add_all(self, batches: Iterator[Batch], advance: Callable[[int], object]) -> None:
        lockstep = Lockstep(self.processes)
        try:
            for batch in lockstep.through(batches):
                before = self.accumulator.samples
                self._add(batch)
                self._batch = batch
                advance(self.accumulator.samples - before)
        except Exception as error:
            lockstep.fail(error)
            raise

    def _end(self) -> None:
        call = self._batch and self.lift.rest(self._batch, self._receive)
        if call is not None:
            self.accumulator.count(*call.counted)
        if self.run is not None:
            self.run.end(self.accumulator)

    def _add(self, batch: Batch) -> None:
        if self.run is not None and batch.number < self.run.done:
            self.run.skip(batch, self.accumulator)
            return
        repeated = self.lift.repeated(batch)
        if repeated is not None:
            lifted, size = repeated
            self.accumulator.add(lifted, [])
            self.accumulator.count(size, None)
            return
        if batch.number == 0:  # here, where errors do not name the batch
            check_params(self.lift.params)
        calls = self.lift(batch, self._receive)
        for call in calls:
            self.accumulator.count(*call.counted)
        if self.run is not None:
            self.run.commit(batch, calls[-1], self.accumulator)

    def _receive(self, lifted: Tree, chunk: Call) -> None:
        given = chunk.tensors if chunk.weights is None else [*chunk.tensors, chunk.weights]
        if self.run is not None:
            lifted = self.run.receive(lifted, chunk)
        self.accumulator.add(lifted, given)


class Lockstep:
    """One all-reduce of two numbers for each batch: how many processes go on, and how many failed.

    It runs while the batch is computed, and is awaited before the next one. So a process learns of an error elsewhere
    after one more batch, and processes without batches left wait for the others.
    """

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self._round: tuple[torch.Tensor, dist.Work] | None = None
        self._is_over = False

    def through(self, items: Iterable[T]) -> Iterator[T]:
        """Iterate over the items of this process, and wait until all processes have finished theirs."""
        if self.processes.group is None:
            yield from items
            return
        source, has_more = iter(items), True
        while True:
            item = next(source, self)
            has_more = item is not self
            going, failed = self._await()
            if failed:
                self._is_over = True
                self.processes.raise_failures(None)
            if not going:
                return
            self._begin(going=has_more, failed=False)
            if item is not self:
                yield item  # type: ignore[misc]  # the sentinel is this object

    def fail(self, error: Exception) -> None:
        """Report an error of this process to the others."""
        if self.processes.group is None or self._is_over:
            return
        _, failed = self._await()
        if not failed:
            self._begin(going=False, failed=True)
            self._await()
        self.processes.raise_failures(f"{type(error).__name__}: {error}")

    def _begin(self, *, going: bool, failed: bool) -> None:
        state = torch.tensor([going, failed], dtype=torch.int32, device=self.processes.device)
        self._round = state, dist.all_reduce(state, group=self.processes.group, async_op=True)

    def _await(self) -> tuple[int, int]:
        if self._round is None:
            return 1, 0
        state, work = self._round
        self._round, self._is_over = None, True
        with self.processes.answered():
            work.wait()
        self._is_over = False
        going, failed = state.tolist()
        return going, failed
