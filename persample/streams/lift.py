"""What is computed for each batch of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from persample import inputs, pipeline
from persample.engines.compiled import PROGRAMS, Asked, FlatParams, lift_compiled, repeated
from persample.engines.diagnosis import unwritten
from persample.engines.fallback import answered
from persample.engines.uncompiled import ENGINES, empty
from persample.inputs import Call
from persample.inputs.sharding import on_shards
from persample.merge import AnyOf, merge_all
from persample.processes import Processes
from persample.reductions import Reduction
from persample.reductions.base import Reductions
from persample.streams.batches import Batch, InBatch
from persample.streams.unit_stream import UnitStream
from persample.unit_gradients import in_first_order
from persample.utils import rng
from persample.utils.isolation import isolated
from persample.utils.trees import Tree


class RandomStream:
    """A stream of its own, seeded from the global one, for the losses; the global one is left to the batches.

    So the batches do not depend on what the losses draw, and a run that is resumed meets the same batches. Under "same"
    all chunks of all batches draw the same numbers.
    """

    def __init__(self, randomness: str) -> None:
        self.randomness = randomness
        self.state: list[Tensor] = []

    def seed(self, processes: Processes) -> None:
        """Take the seed from the global stream of the first process; under "different" each process draws its own."""
        if self.randomness == "error":
            return
        seed = int(torch.randint(2**62, (), device="cpu"))
        seed = processes.gather_objects(seed)[0] + (processes.rank if self.randomness == "different" else 0)
        with rng.kept():
            torch.manual_seed(seed)
            self.state = rng.snapshot()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Let the loss of one chunk draw random numbers."""
        if self.randomness == "error":
            yield
            return
        with rng.kept():
            rng.rewind(self.state)
            yield
            if self.randomness == "different":
                self.state = rng.snapshot()


@dataclass(frozen=True)
class BatchLift:
    """The gradients of one batch, chunk by chunk, lifted to mergeable leaves."""

    losses: Mapping[Any, Callable[..., Tree]]  # the user's loss, or losses, by name
    params: Tree
    wanted: list[Reduction]
    options: dict[str, Any]  # ``in_dims``, ``keep_batch_dim``, ``randomness``, ``outputs`` and ``memory``
    chunk_size: int | None  # the number of samples processed at a time, or None for a whole batch
    engine: str
    random: RandomStream  # the random numbers that the loss draws
    repeats: bool  # whether programs of earlier batches may answer
    units: UnitStream

    def __call__(self, batch: Batch, receive: Callable[[Tree, Call], object]) -> list[Call]:
        """Compute one batch, and return what was computed: it, or samples that have waited and it.

        ``receive`` gets the leaves of each chunk, and the chunk.
        """

        def compute() -> list[Call]:
            calls = self._normalized(batch)
            for call in calls:
                self._compute(call, batch, receive)
            return calls

        with InBatch(batch.name):
            return isolated(self.params, compute)

    def rest(self, batch: Batch, receive: Callable[[Tree, Call], object]) -> Call | None:
        """Compute the samples that wait after the last batch."""
        call = self.units.rest()
        if call is not None:
            with InBatch(batch.name):
                isolated(self.params, lambda: self._compute(call, batch, receive))
        return call

    def _compute(self, call: Call, batch: Batch, receive: Callable[[Tree, Call], object]) -> None:
        def computed(chunk: Call) -> Tree:
            with self.random.drawing():
                return self._lifted(chunk, self._asked(batch) if self.repeats and chunk is call else None)

        chunks = call.chunks(self.chunk_size)
        shards = on_shards(call, self.wanted, self.engine, self.chunk_size) if call.is_sharded else nullcontext()
        with unwritten(call), shards:
            if call.order is not None:  # rows are sorted when all of them are known
                lifted = merge_all(map(computed, chunks))
                receive(in_first_order(call.order, lifted, Reductions(self.wanted)), call)
                return
            for chunk in chunks:
                receive(computed(chunk), chunk)

    def repeated(self, batch: Batch) -> tuple[Tree, int, Tensor | None] | None:
        """Return the leaves of a batch by the program of an earlier one like it, the number of samples, and weights.

        They share no memory with the batch. None where there is no such program.
        """
        if not self.repeats or batch.loss is not None or not self.units.is_whole(batch):
            return None
        with InBatch(batch.name), self.random.drawing():
            found = repeated(self._asked(batch))
        if found is None:
            vars(self).pop("_flat_params")  # a parameter may have been replaced
        return found

    def _asked(self, batch: Batch) -> Asked:
        return Asked(
            self.losses[batch.loss],
            self.params,
            batch.content,
            self.wanted,
            container=None,
            out=None,
            options=(self.engine, *self.options.values(), self.chunk_size, batch.unit, self.units.reduce),
            weights=batch.weights,
            flat_params=self._flat_params,
        )

    @cached_property
    def _flat_params(self) -> FlatParams | None:
        # A module is walked through once: a parameter that is replaced later is another input of the captured loss.
        return FlatParams.of(self.params) if isinstance(self.params, nn.Module) else None

    @property
    def device(self) -> torch.device:
        """The device of the parameters, which need not be checked yet."""
        tensors = [x for x in FlatParams.of(self.params).tensors if isinstance(x, Tensor)]
        return (tensors or inputs.check_params(self.params).tensors)[0].device

    def normalized(self, batch: Batch) -> Call:
        """Return a batch, normalized; nothing is computed, and no samples wait."""
        with InBatch(batch.name):
            return isolated(self.params, lambda: self._normalized(batch))[0]

    def _normalized(self, batch: Batch) -> list[Call]:
        call = inputs.normalize(
            self.losses[batch.loss],
            self.params,
            batch.content,
            self.wanted,
            weights=batch.weights,
            given=batch.name,
            is_part=True,
            takes_shards=True,
            **self.options,
        )
        if batch.loss is not None and call.weights is None:  # each loss counts as one
            ones = call.params[0].new_ones(call.size, dtype=torch.float64)
            call = replace(call, weights=ones / max(call.size, 1))
        return self.units.whole(call, batch.unit)

    def without_samples(self, call: Call) -> Tree:
        """Return the leaves of an empty batch, which have the form of any batch's leaves."""
        return isolated(self.params, lambda: self._lifted(call.none()))

    def _lifted(self, chunk: Call, asked: Asked | None = None) -> Tree:
        reductions = Reductions(self.wanted)

        def by(way: pipeline.Engine) -> Tree:
            return pipeline.lift_by(way, reductions)(chunk)

        def first() -> Tree:
            if self.engine in PROGRAMS:
                return lift_compiled(chunk, reductions, asked, engine=self.engine)
            return by(ENGINES[self.engine])

        if chunk.size:
            return answered(chunk, self.engine, first, by)
        leaves, _ = by(empty)
        return leaves, AnyOf(False)  # a loss that is not called is not known to depend on anything
