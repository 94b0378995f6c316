"""The second pass: the per-sample gradients of ⟨f(xᵢ), dL/dzᵢ⟩, chunk by chunk, by the pipeline of all gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from persample.composite.chunk_engine import chunk_engine
from persample.composite.encoder import Encoder
from persample.composite.first_pass import FirstPass
from persample.composite.full_batch import Statistics, normalized, solve_adjoint
from persample.composite.nondeterminism import checked
from persample.engines import ENGINES
from persample.engines.diagnosis import unwritten
from persample.engines.fallback import answered
from persample.gradients import Gradients
from persample.inputs.call import Call, NotConnectedError
from persample.merge import merge_all
from persample.pipeline import Engine, Lift, lift_by
from persample.processes import Processes
from persample.reductions.base import Reductions
from persample.utils import rng, trees
from persample.utils.numerics import accumulate_dtype, as_real


def back_propagate(
    encoder: Encoder,
    first: FirstPass,
    cotangents: Sequence[Tensor | None],
    reductions: Reductions,
    processes: Processes,
) -> Any:
    """Lift the gradients of all samples' contributions.

    Args:
        encoder: the encoder and its samples.
        first: the result of the first pass.
        cotangents: dL/dz, one per leaf of z; None where L does not depend on it.
        reductions: the reductions of the samples' contributions.
        processes: the processes that the samples are spread over.

    Returns:
        The leaves of every reduction, merged over all chunks, and whether z depends on any parameter.
    """

    def chunks(statistics: Sequence[Statistics] | None) -> Iterator[Call]:
        replay = Replay(first.start)
        call = contributions(encoder.call, replace(first, statistics=statistics), cotangents, replay)
        return replay.over(call.chunks(encoder.chunk_size))

    used = any(cotangent is not None for cotangent in cotangents)
    lift_chunk = _lift(encoder, first.z, reductions) if used else lift_by(_zeros, reductions)
    statistics = first.statistics
    if statistics and used:
        statistics = solve_adjoint(chunks, statistics, processes)

    def lift() -> Any:
        with unwritten(encoder.call):
            return merge_all(map(lift_chunk, chunks(statistics)))

    return processes.together(lift)


def contributions(call: Call, first: FirstPass, cotangents: Sequence[Tensor | None], replay: Replay) -> Call:
    """Return the call whose sample i has the loss ⟨f(xᵢ), dL/dzᵢ⟩, and the leaves of f(xᵢ) as aux.

    The leaves of its batch are those of the samples, dL/dz, z of the first pass, and the statistics.

    Args:
        call: the encoder f and its samples.
        first: the result of the first pass; where it has statistics, their contributions to L are added.
        cotangents: dL/dz, one per leaf of z; None where L does not depend on it.
        replay: records where each forward pass ends.
    """
    f, z = call.loss, trees.flatten(first.z)[0]
    used = [cotangent is not None for cotangent in cotangents]
    given = [cotangent for cotangent in cotangents if cotangent is not None]

    def loss(params: Any, leaves: Any, given: Any, _: Any, statistics: Any) -> tuple[Any, Any]:
        sample = trees.unflatten(list(leaves), f.batch)
        z, term = normalized(f.fn, statistics)(params, *(sample if f.unpack else (sample,)))
        replay.forward_done()
        found = trees.flatten(z)[0]
        moving = [leaf for leaf, counts in zip(found, used, strict=True) if counts]
        return sum(map(inner_product, moving, given), start=term), found

    leaves, batch = trees.flatten((call.leaves, given, z, first.statistics))
    rows = (*call.leaves_batched, *(True for _ in (*given, *z)))
    batched = (*rows, *(False for _ in leaves[len(rows) :]))
    contribution = replace(f, fn=loss, batch=batch, batched=batched, unpack=True)
    return replace(call, loss=contribution, leaves=tuple(leaves), leaves_batched=batched)


def inner_product(z: Tensor, cotangent: Tensor) -> Tensor:
    """Return ⟨z, c⟩, whose gradient is c: complex numbers as pairs of reals, summed in float32 at least.

    Examples:
        >>> import torch
        >>> inner_product(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
        tensor(11.)
    """
    dtype = accumulate_dtype(z.dtype)
    return (as_real(z).to(dtype) * as_real(cotangent).to(dtype)).sum()


def _lift(encoder: Encoder, z: Any, reductions: Reductions) -> Lift:
    """Return the function that lifts a chunk by the engine of the encoder's mode; a chunk may contribute nothing."""
    own, zeros = chunk_engine if encoder.mode == "batched" else ENGINES[encoder.mode], lift_by(_zeros, reductions)

    def lift(chunk: Call) -> Any:
        def by(engine: Engine) -> Any:
            return lift_by(checked(engine, encoder, z), reductions)(chunk)

        try:
            if encoder.mode == "eager" and chunk.size:
                return answered(chunk, encoder.mode, lambda: by(own), by)
            return by(own) if chunk.size else zeros(chunk)
        except NotConnectedError:  # this encoder is frozen, others need not be
            return zeros(chunk)

    return lift


def _zeros(chunk: Call, required_ops: frozenset[str]) -> Gradients:  # noqa: ARG001 (an engine's signature)
    """Return gradients of zero, those of contributions that depend on no parameter."""
    pairs = zip(chunk.params, chunk.loss.spec.shapes, strict=True)
    values = [x.new_zeros(()).expand(chunk.size, *shape) for x, shape in pairs]
    losses = chunk.params[0].real.new_zeros(chunk.size)
    return Gradients.dense(values, spec=chunk.loss.spec, losses=losses, connected=False)


class Replay:
    """The random streams of one pass over the chunks; each forward pass continues where the previous one ended.

    Random numbers drawn by backward passes do not advance the replayed streams. Only one position is stored, not one
    per chunk.

    Args:
        start: the states of the random streams at the start of the first pass.
    """

    def __init__(self, start: rng.Streams) -> None:
        self._position = start

    def over(self, chunks: Iterable[Call]) -> Iterator[Call]:
        """Iterate over chunks; the streams are set to their states at the same chunk of the first pass.

        Args:
            chunks: the chunks.

        Yields:
            The chunks.
        """
        for chunk in chunks:
            self._position.go_back()
            yield chunk
            torch.clear_autocast_cache()  # which holds casts of every chunk's copies of the parameters

    def forward_done(self) -> None:
        """Record the states of the streams after a forward pass."""
        self._position = rng.Streams.now()
