"""The first pass: z of every sample, without a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from persample.composite.encoders import BufferRecorder, Encoder
from persample.composite.full_batch import Statistics, normalized, solve_statistics
from persample.engines.diagnosis import diagnosed, hinted, unwritten
from persample.engines.uncompiled import no_rows, of_fake_sample, vmapped
from persample.errors import LossError
from persample.inputs.call import Call, SampleLoss
from persample.processes import Processes
from persample.utils import rng, trees
from persample.utils.trees import Leaf, Tree
from persample.vmap_rules import VmapRules
from persample.vmap_rules.effects import guarded


def encode_chunk(chunk: Call, mode: str) -> Tree:
    """Encode the samples of a chunk."""
    if mode == "batched":
        return _at_once(chunk)
    if not chunk.size:
        z = trees.tree_map(no_rows, of_fake_sample(partial(_returned, chunk.loss), chunk))
    else:
        z = _under_vmap(chunk) if mode == "eager" else _one_by_one(chunk)
    return trees.tree_map(lambda x: x.squeeze(1), z) if chunk.loss.keep_batch_dim else z


def _under_vmap(chunk: Call) -> Tree:
    def one(params: Sequence[Tensor], leaves: Sequence[Leaf]) -> Tree:
        with VmapRules():
            return _returned(chunk.loss, params, leaves)

    with diagnosed(chunk, batched=True), hinted(chunk):
        return vmapped(one, chunk)


def _one_by_one(chunk: Call) -> Tree:
    rows = []
    for i in range(chunk.size):
        with diagnosed(chunk, batched=False), hinted(chunk, i):
            rows.append(guarded(_returned)(chunk.loss, *chunk.at(i)))
    return trees.tree_map(lambda *z: torch.stack(z), *rows)


def _at_once(chunk: Call) -> Tree:
    with diagnosed(chunk, batched=False):
        z = guarded(_returned)(chunk.loss, chunk.params, chunk.leaves)
    for path, leaf in _named(z):
        if leaf.shape[:1] != (chunk.size,):
            raise LossError(
                f"{chunk.loss.called}: with batched=True expected {path} to hold one row for each of the {chunk.size} "
                f"samples of a chunk, received shape {list(leaf.shape)}. Return [chunk, ...], or write encode_fn for "
                "one sample and leave batched=False."
            )
    return z


def _returned(encoder: SampleLoss, params: Sequence[Tensor], leaves: Sequence[Leaf]) -> Tree:
    """Call the encoder and return z; reject any result but a tree of tensors."""
    z = encoder.returned(params, leaves)
    named = _named(z)
    for path, leaf in named:
        if not isinstance(leaf, Tensor):
            raise LossError(
                f"{encoder.called}: expected {path} to be a tensor, received {type(leaf).__name__}. Return a tensor, "
                "or a dict, tuple or list of tensors."
            )
        if encoder.keep_batch_dim and leaf.shape[:1] != (1,):
            raise LossError(
                f"{encoder.called}: with keep_batch_dim=True expected {path} to keep the leading axis of 1, received "
                f"shape {list(leaf.shape)}. Return [1, ...]."
            )
    if not named:
        raise LossError(f"{encoder.called}: expected tensors, received an empty {type(z).__name__}. Return z.")
    return z


def _named(z: object) -> list[tuple[str, Leaf]]:
    return list(zip(trees.paths(z, "z"), trees.flatten(z)[0], strict=True))


@dataclass(frozen=True)
class FirstPass:
    """z of all samples, with the random state and the statistics that the second pass needs to compute the same z."""

    z: Tree  # a tree of detached tensors ``[n, ...]`` in memory of their own
    start: rng.Streams  # the states of the random streams before the pass
    statistics: Sequence[Statistics] | None  # the statistics that batch norms are given; None for those of each chunk


def encode(encoder: Encoder, recorder: BufferRecorder | None, processes: Processes) -> FirstPass:
    """Encode all samples, chunk by chunk."""
    start = rng.Streams.now()
    statistics = _statistics(encoder, start, processes)
    forward = normalized(encoder.call.loss.fn, statistics)
    replaced = encoder.calling(lambda *args: forward(*args)[0])

    def chunk_by_chunk() -> Tree:
        with unwritten(encoder.call):
            chunks = replaced.chunks() if recorder is None else map(recorder.recorded, replaced.chunks())
            pieces = [trees.tree_map(compact, encode_chunk(chunk, encoder.mode)) for chunk in chunks]
        return trees.tree_map(lambda *rows: torch.cat(rows), *pieces)

    return FirstPass(processes.together(chunk_by_chunk), start, statistics)


def compact(z: Tensor) -> Tensor:
    """Return z detached, without the larger tensor that it may be a view of (one token of a sequence, say)."""
    alone = z.untyped_storage().nbytes() == z.numel() * z.element_size()
    return z.detach() if alone else z.detach().clone(memory_format=torch.contiguous_format)


def _statistics(encoder: Encoder, start: rng.Streams, processes: Processes) -> Sequence[Statistics] | None:
    if encoder.batch_norm == "full":
        return solve_statistics(encoder, start, processes)
    # torch's batch norm rejects an empty chunk; ours normalizes it with the chunk's own statistics.
    return [] if encoder.batch_norm == "chunk" and not encoder.call.size else None
