"""The pipeline from a call to its results: on every chunk an engine and ``lift``; then merge and ``finish``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from persample.gradients import Gradients
from persample.inputs.call import Call
from persample.inputs.loss import NotConnectedError
from persample.merge import merge
from persample.reductions.requested import Reductions
from persample.utils import rng

Engine: TypeAlias = Callable[[Call, frozenset[str]], Gradients]  # (chunk, operations that ``lift`` calls) -> Gradients


def lift_chunks(chunks: Iterable[Call], engine: Engine, reductions: Reductions) -> Any:
    """Lift the gradients of every chunk and merge the leaves.

    Args:
        chunks: the chunks of a call, at least one.
        engine: computes the gradients of a chunk.
        reductions: the reductions of the call.

    Returns:
        The merged leaves of every reduction, and whether the loss depends on any parameter.
    """
    return merge_lifted(reductions.lift(engine(chunk, reductions.required_ops)) for chunk in chunks)


def merge_lifted(lifted: Iterable[Any]) -> Any:
    """Return the merged leaves of all chunks; the leaves of at most two chunks exist at a time.

    Args:
        lifted: what ``Reductions.lift`` returned for each chunk.
    """
    return functools.reduce(merge, lifted)


def finish(call: Call, lifted: Any, reductions: Reductions, out: Sequence[Any] | None = None) -> list[Any]:
    """Return the result of every reduction.

    Args:
        call: the call.
        lifted: the merged leaves of all its chunks.
        reductions: the reductions of the call.
        out: one previous result per reduction, whose memory may be overwritten.

    Raises:
        NotConnectedError: if the loss depends on no parameter.
    """
    leaves, connected = lifted
    if not connected.value:
        raise NotConnectedError
    return reductions.finish(leaves, call.params[0].device, out)


def run(
    call: Call, engine: Engine, reductions: Reductions, chunk_size: int | None, out: Sequence[Any] | None = None
) -> list[Any]:
    """Return the result of every reduction.

    Args:
        call: the call.
        engine: computes the gradients of a chunk.
        reductions: the reductions of the call.
        chunk_size: the number of samples processed at a time, or None for all.
        out: one previous result per reduction, whose memory may be overwritten.
    """
    chunks = rng.replayed(call.chunks(chunk_size), call.randomness)
    return finish(call, lift_chunks(chunks, engine, reductions), reductions, out)
