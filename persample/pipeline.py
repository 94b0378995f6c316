"""From a call to its results: an engine and the reductions' ``lift`` on every chunk, merge, ``finish``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from persample.gradients import Gradients
from persample.inputs.call import Call
from persample.inputs.loss import NotConnectedError
from persample.merge import merge_all
from persample.reductions.requested import Reductions
from persample.utils import rng

Engine: TypeAlias = Callable[[Call, frozenset[str]], Gradients]  # from a chunk and the operations that lift calls
Lift: TypeAlias = Callable[[Call], Any]  # from a chunk to what ``Reductions.lift`` returns for it


def lift_by(engine: Engine, reductions: Reductions) -> Lift:
    """Return the function that computes the gradients of a chunk and lifts them.

    Args:
        engine: computes the gradients of a chunk.
        reductions: what is asked of them.
    """
    return lambda chunk: reductions.lift(engine(chunk, reductions.required_ops))


def lift_chunks(chunks: Iterable[Call], engine: Engine, reductions: Reductions) -> Any:
    """Lift the gradients of every chunk and merge the leaves.

    Args:
        chunks: the chunks of a call, at least one.
        engine: computes the gradients of a chunk.
        reductions: what is asked of them.

    Returns:
        The merged leaves of every reduction, and whether the loss depends on any parameter.
    """
    return merge_all(map(lift_by(engine, reductions), chunks))


def finish(call: Call, lifted: Any, reductions: Reductions) -> list[Any]:
    """Return the result of every reduction.

    Args:
        call: the call.
        lifted: the merged leaves of all its chunks.
        reductions: what was asked for.

    Raises:
        NotConnectedError: if the loss depends on no parameter.
    """
    leaves, connected = lifted
    if not connected.value:
        raise NotConnectedError
    return reductions.finish(leaves, call.params[0].device)


def run(call: Call, lift: Lift, reductions: Reductions, chunk_size: int | None) -> list[Any]:
    """Compute the result of every reduction, chunk by chunk.

    Args:
        call: the call.
        lift: computes the gradients of a chunk and lifts them.
        reductions: what is asked of the gradients.
        chunk_size: how many samples are processed at a time, or None for all.

    Returns:
        One result per reduction.

    Raises:
        NotConnectedError: if the loss depends on no parameter.
    """
    chunks = rng.replayed(call.chunks(chunk_size), call.randomness)
    return finish(call, merge_all(map(lift, chunks)), reductions)
