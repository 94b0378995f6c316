"""What is computed for each batch of a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from persample import inputs, pipeline
from persample.engines import ENGINES, Asked, empty, lift_compiled, repeated
from persample.engines.diagnosis import unwritten
from persample.engines.fallback import answered
from persample.inputs import Call
from persample.merge import AnyOf
from persample.reductions import Reduction
from persample.reductions.requested import Reductions
from persample.streams.batches import Batch, named
from persample.streams.randomness import RandomStream
from persample.utils.isolation import isolated


@dataclass(frozen=True)
class BatchLift:
    """The gradients of one batch, chunk by chunk, lifted to mergeable leaves.

    Args:
        loss_fn: the user's loss.
        params: the user's parameters.
        wanted: the reductions.
        options: ``in_dims``, ``keep_batch_dim``, ``randomness``, ``outputs`` and ``memory``.
        chunk_size: the number of samples processed at a time, or None for a whole batch.
        engine: the name of the engine.
        random: the random numbers that the loss draws.
    """

    loss_fn: Callable[..., Any]
    params: Any
    wanted: list[Reduction]
    options: dict[str, Any]
    chunk_size: int | None
    engine: str
    random: RandomStream

    def __call__(self, batch: Batch, receive: Callable[[Any, Call], object]) -> Call:
        """Compute one batch.

        Args:
            batch: the batch.
            receive: is called with the leaves of each chunk, and the chunk.

        Returns:
            The normalized batch.
        """

        def compute() -> Call:
            call = self._normalized(batch)
            with unwritten(call):
                for chunk in call.chunks(self.chunk_size):
                    with self.random.drawing():
                        lifted = self._lifted(chunk, self._asked(batch))
                    receive(lifted, chunk)
            return call

        with named(batch.name):
            return isolated(self.params, compute)

    def repeated(self, batch: Batch) -> tuple[Any, int] | None:
        """Return the leaves of a batch by the compiled program of an earlier one like it, and its number of samples.

        Args:
            batch: the batch.

        Returns:
            Leaves that share no memory with the batch; None where there is no such program.
        """
        if self.engine != "compiled" or batch.weights is not None:
            return None
        with named(batch.name), self.random.drawing():
            return repeated(self._asked(batch))

    def _asked(self, batch: Batch) -> Asked:
        options = (*self.options.values(), self.chunk_size)
        return Asked(self.loss_fn, self.params, batch.content, self.wanted, None, None, options)

    def normalized(self, batch: Batch) -> Call:
        """Return a batch, normalized; nothing is computed."""
        with named(batch.name):
            return isolated(self.params, lambda: self._normalized(batch))

    def _normalized(self, batch: Batch) -> Call:
        return inputs.normalize(
            self.loss_fn,
            self.params,
            batch.content,
            self.wanted,
            weights=batch.weights,
            given=batch.name,
            is_part=True,
            **self.options,
        )

    def without_samples(self, call: Call) -> Any:
        """Return the leaves of none of the samples of a batch, which show the form of those of any."""
        return isolated(self.params, lambda: self._lifted(call.none()))

    def _lifted(self, chunk: Call, asked: Asked | None = None) -> Any:
        reductions = Reductions(self.wanted)

        def by(way: pipeline.Engine) -> Any:
            return pipeline.lift_by(way, reductions)(chunk)

        def first() -> Any:
            return lift_compiled(chunk, reductions, asked) if self.engine == "compiled" else by(ENGINES[self.engine])

        if chunk.size:
            return answered(chunk, self.engine, first, by)
        leaves, _ = by(empty)
        return leaves, AnyOf(False)  # a loss that is not called is not known to depend on anything
