"""The two passes over the samples of one tower."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks

from persample import engines
from persample.composite.batch_norm import RECOMPUTED, FullBatch, Refused
from persample.composite.buffers import Watch
from persample.composite.chunk_engine import whole as of_chunk
from persample.composite.encode import at_once, first_pass, one_by_one, whole
from persample.composite.encoder import Tower
from persample.composite.full_batch import solve_adjoint, solve_statistics
from persample.composite.nondeterminism import not_replayed
from persample.composite.processes import Processes
from persample.composite.replay import NotReplayedError, Replay, Replayed, contributions, tolerance
from persample.composite.retained_graph import KeptGraph
from persample.engines.diagnosis import unwritten
from persample.errors import LossError
from persample.gradients import Gradients
from persample.inputs.call import Call
from persample.inputs.loss import NotConnectedError, SampleLoss
from persample.merge import merge
from persample.reductions import Reduction
from persample.reductions.requested import Reductions
from persample.utils import rng, trees

# How a chunk is encoded, and which engine differentiates it.
WAYS: dict[str, tuple[Any, Any]] = {
    "eager": (at_once, engines.ENGINES["eager"]),
    "loop": (one_by_one, engines.ENGINES["loop"]),
    "batched": (whole, of_chunk),
}


class Passes:
    """First all samples without a graph, later all of them with one, a chunk at a time.

    Args:
        tower: the encoder and its samples.
        way: a key of ``WAYS``.
        batch_norm: "refuse", "chunk" or "full".
        processes: which of them the samples are spread over.
    """

    def __init__(self, tower: Tower, way: str, batch_norm: str, processes: Processes) -> None:
        self._encode, self._engine = WAYS[way]
        alone = way == "batched" and batch_norm == "refuse" and len([*tower.chunks()]) == 1
        self._kept = KeptGraph() if alone and tower.samples.size else None
        self._processes = processes
        self._solves = batch_norm == "full"
        self._mode: Any = None
        if batch_norm != "refuse":
            tower = _computed_once(tower)
        elif way == "batched":
            self._mode = Refused()
        if self._solves or (batch_norm == "chunk" and not tower.samples.size):  # torch's own refuses no samples
            self._mode = FullBatch()
        self._tower = _under(self._mode, tower)

    @property
    def size(self) -> int:
        """The number of samples."""
        return self._tower.samples.size

    @property
    def leaves(self) -> int:
        """How many tensors z is made of."""
        return len(trees.flatten(self._z)[0])

    def prepare(self) -> None:
        """Note where the random streams stand, and find the statistics of all samples if they are asked for."""
        self._start = rng.Streams.now()
        if self._solves:
            solve_statistics(self._tower, self._mode, self._start, self._processes)
            self._start.go_back()

    def first(self, watch: Watch | None) -> Any:
        """Return z of all samples.

        Args:
            watch: notes what is left in buffers, if they are to be kept.
        """
        encode = self._encode if self._kept is None else self._kept.encode
        self._z = first_pass(self._tower if watch is None else watch.over(self._tower), encode)
        return self._z

    def aim(self, cotangents: Sequence[Tensor | None]) -> None:
        """Take ⟨z, dL/dz⟩ as the loss from now on.

        Args:
            cotangents: dL/dz, one per leaf of z; None where L does not depend on it.
        """
        self._cotangents = cotangents
        self._replay = Replay(self._start)
        self._used = any(cotangent is not None for cotangent in cotangents)
        further = (lambda: self._mode.terms) if self._solves else lambda: 0.0
        self._losses = contributions(self._tower, self._z, cotangents, self._replay, further)
        if self._solves and self._used:
            solve_adjoint(self._losses, self._mode, self._replay, self._processes)

    def second(self, wanted: Sequence[Reduction]) -> Any:
        """Return the leaves of every reduction, merged over all chunks, and whether z depends on any parameter.

        Args:
            wanted: the reductions.
        """
        losses = self._losses
        if self._kept is not None:
            return self._kept.lifted(Reductions(wanted), losses.encoder, self._cotangents)
        lift = Reductions([*wanted, Replayed(tolerance(self._tower.encoder, self._z))])
        with unwritten(losses.samples):
            chunks = self._replay.over(losses.chunks())
            lifted, connected = functools.reduce(merge, (self._lifted(lift, chunk) for chunk in chunks))
        return lifted[:-1], connected

    def _lifted(self, lift: Reductions, chunk: Call) -> Any:
        encoder = self._losses.encoder
        if not chunk.size or not self._used:
            return _zeros(lift, encoder, chunk)
        try:
            return lift.lift(self._engine(chunk, lift.required_ops))
        except NotConnectedError:  # a frozen tower beside others
            return _zeros(lift, encoder, chunk)
        except NotReplayedError as error:
            path = trees.paths(self._z, "z")[error.leaf]
            encode = functools.partial(self._encode, self._tower.encoder, self._own(chunk))
            raise not_replayed(error, path, self._tower, encode, self._start) from None

    def _own(self, chunk: Call) -> Call:
        """Return a chunk without what was added to the inputs."""
        count = len(self._tower.samples.leaves)
        leaves, batched = chunk.leaves[:count], chunk.leaves_batched[:count]
        return replace(chunk, loss=self._tower.encoder, leaves=leaves, leaves_batched=batched)


def _under(mode: Any, tower: Tower) -> Tower:
    if mode is None:
        return tower
    fn = tower.encoder.fn

    def encode(params: Any, *sample: Any) -> Any:
        mode.begin()
        with mode:
            return fn(params, *sample)

    return tower.calling(encode)


def _computed_once(tower: Tower) -> Tower:
    """Return a tower that refuses to be recomputed in its backward pass."""
    fn = tower.encoder.fn

    def encode(params: Any, *sample: Any) -> Any:
        try:
            with disable_saved_tensors_hooks(RECOMPUTED):
                return fn(params, *sample)
        except RuntimeError as error:
            if str(error) != RECOMPUTED:
                raise
            raise LossError(RECOMPUTED) from error

    return tower.calling(encode)


def _zeros(lift: Reductions, loss: SampleLoss, samples: Call) -> Any:
    """Lift gradients of zero."""
    pairs = zip(samples.params, loss.spec.shapes, strict=True)
    values = [x.new_zeros(()).expand(samples.size, *shape) for x, shape in pairs]
    losses = samples.params[0].real.new_zeros(samples.size)
    return lift.lift(Gradients.dense(values, spec=loss.spec, losses=losses, connected=False))
