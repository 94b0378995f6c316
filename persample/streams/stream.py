"""One pass over the batches: each is lifted and merged; then the processes are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from persample.inputs import Call, check_params
from persample.inputs.loss import NotConnectedError
from persample.processes import Processes
from persample.streams.accumulator import Accumulator, Partial
from persample.streams.batches import Batch, no_batch, numbered
from persample.streams.lift import BatchLift
from persample.streams.lockstep import Lockstep
from persample.streams.order import Order
from persample.streams.ranks import merge_ranks
from persample.streams.sink import SinkRun


class Stream:
    """One call of ``accumulate``.

    Args:
        lift: what is computed for each batch.
        order: how the data set is spread over the processes.
        processes: the processes.
        run: the folder that rows go to, or None.
    """

    def __init__(self, lift: BatchLift, order: Order, processes: Processes, run: SinkRun | None) -> None:
        self.lift, self.order, self.processes, self.run = lift, order, processes, run
        self.accumulator = Accumulator()

    def through(self, batches: Any, weights: Any, advance: Callable[[int], object]) -> None:
        """Go through the batches of this process.

        Args:
            batches: an iterable of batches.
            weights: their weights.
            advance: is called after each batch, with the number of its samples.
        """
        self.lift.random.seed(self.processes)
        try:
            self._add_all(batches, weights, advance)
            self.processes.together(self._end)
        finally:
            if self.run is not None:
                self.run.close()

    def merged(self) -> Partial:
        """Merge the results of all processes.

        Returns:
            The merged leaves of every reduction.

        Raises:
            ArgumentError: if no process had a batch, or if there are too few samples for an average.
            NotConnectedError: if the loss depends on no parameter.
        """
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

    def _add_all(self, batches: Any, weights: Any, advance: Callable[[int], object]) -> None:
        lockstep = Lockstep(self.processes)
        try:
            for batch in lockstep.through(numbered(batches, weights)):
                before = self.accumulator.samples
                self._add(batch)
                advance(self.accumulator.samples - before)
        except Exception as error:
            lockstep.fail(error)
            raise

    def _end(self) -> None:
        if self.run is not None:
            self.run.end(self.accumulator)

    def _add(self, batch: Batch) -> None:
        if self.run is not None and batch.number < self.run.done:
            self.run.skip(batch, self.accumulator)
            return
        repeated = self.lift.repeated(batch, self.accumulator.total)
        if repeated is not None:
            merged, size = repeated
            self.accumulator.take(merged, [])
            self.accumulator.count(size, None)
            return
        if batch.number == 0:  # here, where errors do not name the batch
            check_params(self.lift.params)
        call = self.lift(batch, lambda: self.accumulator.total, self._receive)
        self.accumulator.count(call.size, call.weights)
        if self.run is not None:
            self.run.commit(batch, call, self.accumulator)

    def _receive(self, lifted: Any, chunk: Call) -> None:
        given = chunk.tensors if chunk.weights is None else [*chunk.tensors, chunk.weights]
        if self.lift.merges:
            self.accumulator.take(lifted, given)
            return
        if self.run is not None:
            lifted = self.run.receive(lifted, chunk)
        self.accumulator.add(lifted, given)
