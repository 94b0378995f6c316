"""The first pass: z of every sample, without a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from persample.composite.buffers import BufferRecorder
from persample.composite.encode import encode_chunk
from persample.composite.encoder import Encoder
from persample.composite.full_batch import solve_statistics
from persample.composite.statistics import Statistics, normalized
from persample.engines.diagnosis import unwritten
from persample.processes import Processes
from persample.utils import rng, trees


@dataclass(frozen=True)
class FirstPass:
    """z of all samples, with the random state and the statistics that the second pass needs to compute the same z.

    Args:
        z: a tree of detached tensors ``[n, ...]`` in memory of their own.
        start: the states of the random streams before the pass.
        statistics: the statistics that batch norms are given; None for those of each chunk.
    """

    z: Any
    start: rng.Streams
    statistics: Sequence[Statistics] | None


def encode(encoder: Encoder, recorder: BufferRecorder | None, processes: Processes) -> FirstPass:
    """Encode all samples, chunk by chunk.

    Args:
        encoder: the encoder and its samples.
        recorder: records the buffers after each chunk, if they are to be updated.
        processes: the processes that the samples are spread over.
    """
    start = rng.Streams.now()
    statistics = _statistics(encoder, start, processes)
    forward = normalized(encoder.call.loss.fn, statistics)
    replaced = encoder.calling(lambda *args: forward(*args)[0])

    def chunk_by_chunk() -> Any:
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
