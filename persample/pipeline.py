"""From a call to its results: an engine and the reductions' ``lift`` on every chunk, merge, ``finish``."""

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

Engine: TypeAlias = Callable[[Call, frozenset[str]], Gradients]  # from a chunk and the operations that lift calls


def lift_chunks(chunks: Iterable[Call], engine: Engine, reductions: Reductions) -> Any:
    """Lift the gradients of every chunk and merge the leaves.

    Args:
        chunks: the chunks of a call, at least one.
        engine: computes the gradients of a chunk.
        reductions: what is asked of them.

    Returns:
        The merged leaves of every reduction, and whether the loss depends on any parameter.
    """
    return merge_lifted(reductions.lift(engine(chunk, reductions.required_ops)) for chunk in chunks)


def merge_lifted(lifted: Iterable[Any]) -> Any:
    """Return the leaves of all chunks, merged: at most two chunks' leaves exist at a time.

    Args:
        lifted: what ``Reductions.lift`` returned for each chunk.
    """
    return functools.reduce(merge, lifted)


def finish(call: Call, lifted: Any, reductions: Reductions, out: Sequence[Any] | None = None) -> list[Any]:
    """Return the result of every reduction.

    Args:
        call: the call.
        lifted: the merged leaves of all its chunks.
        reductions: what was asked for.
        out: one previous result per reduction, whose memory may be written.

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
        reductions: what is asked of them.
        chunk_size: how many samples are processed at a time, or None for all.
        out: one previous result per reduction, whose memory may be written.
    """
    chunks = rng.replayed(call.chunks(chunk_size), call.randomness)
    return finish(call, lift_chunks(chunks, engine, reductions), reductions, out)
