"""The pipeline from a call to its results: on every chunk an engine and ``lift``; then merge and ``finish``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from persample.gradients import Gradients
from persample.inputs.call import Call
from persample.inputs.loss import NotConnectedError
from persample.merge import merge_all
from persample.reductions.base import Reductions
from persample.utils import rng

Engine: TypeAlias = Callable[[Call, frozenset[str]], Gradients]  # (chunk, operations that ``lift`` calls) -> Gradients
Lift: TypeAlias = Callable[[Call], Any]  # from a chunk to the result of ``Reductions.lift``


def lift_by(engine: Engine, reductions: Reductions) -> Lift:
    """Return the function that computes the gradients of a chunk and lifts them.

    Args:
        engine: computes the gradients of a chunk.
        reductions: the reductions of the call.
    """
    return lambda chunk: reductions.lift(engine(chunk, reductions.required_ops))


def lift_chunks(chunks: Iterable[Call], engine: Engine, reductions: Reductions) -> Any:
    """Lift the gradients of every chunk and merge the leaves.

    Args:
        chunks: the chunks of a call, at least one.
        engine: computes the gradients of a chunk.
        reductions: the reductions of the call.

    Returns:
        The merged leaves of every reduction, and whether the loss depends on any parameter.
    """
    return merge_all(map(lift_by(engine, reductions), chunks))


def finish(call: Call, lifted: Any, reductions: Reductions) -> list[Any]:
    """Return the result of every reduction.

    Args:
        call: the call.
        lifted: the merged leaves of all its chunks.
        reductions: the reductions of the call.

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
        reductions: the reductions of the call.
        chunk_size: the number of samples processed at a time, or None for all.

    Returns:
        One result per reduction.

    Raises:
        NotConnectedError: if the loss depends on no parameter.
    """
    chunks = rng.replayed(call.chunks(chunk_size), call.randomness)
    return finish(call, merge_all(map(lift, chunks)), reductions)
