"""The statistics of all samples for every batch norm, and dL/d statistics, with one chunk in memory.

The statistics s of each batch norm depend on those of the earlier ones: s = S(θ, s), a triangular system. With L batch
norms, L passes solve it, and L more passes solve the adjoint system for dL/ds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from persample import naive
from persample.composite.encoder import Encoder
from persample.composite.statistics import FullBatch, Statistics
from persample.engines.diagnosis import diagnosed
from persample.errors import LossError
from persample.inputs.call import Call
from persample.merge import Moments, Summed, merge_all
from persample.processes import Processes, merged
from persample.utils import rng, trees
from persample.vmap_rules.effects import guarded


def solve_statistics(encoder: Encoder, start: rng.Streams, processes: Processes) -> list[Statistics]:
    """Return the statistics of all batch norms; each pass over the samples determines one more.

    Args:
        encoder: the encoder, which takes chunks.
        start: the states of the random streams that every pass starts from, and that are restored at the end.
        processes: the processes that the samples are spread over.

    Raises:
        LossError: if a batch norm sees one number per channel in all, which has no variance.
    """
    statistics: list[Statistics] = []
    while True:
        moments = merged(processes.together(partial(_moments, encoder, statistics)), processes)
        start.go_back()
        statistics = [Statistics.of(one) for one in moments[: len(statistics) + 1]]
        if any(one.n == 1 for one in statistics):
            raise LossError(
                "batch_norm='full': expected more than one number per channel, received one (a batch of 1 sample). "
                "Encode more samples, or use .eval()."
            )
        if len(statistics) == len(moments):
            return statistics


def _moments(encoder: Encoder, statistics: Sequence[Statistics]) -> list[Moments]:
    def moments(chunk: Call) -> list[Moments]:
        with FullBatch(statistics) as mode, diagnosed(chunk, batched=False):
            guarded(chunk.loss.returned)(chunk.params, chunk.leaves)
        return mode.moments

    return merge_all(map(moments, encoder.chunks()))


def solve_adjoint(
    contributions: Callable[[Sequence[Statistics]], Iterable[Call]],
    statistics: Sequence[Statistics],
    processes: Processes,
) -> Sequence[Statistics]:
    """Return the statistics with dL/d statistics; each pass determines one more, from the last to the first.

    Args:
        contributions: from statistics to the chunks of the second pass, whose last leaves are the statistics.
        statistics: those of all batch norms.
        processes: the processes that the samples are spread over.
    """
    for _ in range(len(statistics)):
        by = merged(processes.together(partial(_derivatives, contributions, statistics)), processes)
        pairs = zip(by[::2], by[1::2], strict=True)
        statistics = [
            Statistics(one.mean, one.variance, one.n, by_mean.value, by_variance.value)
            for one, (by_mean, by_variance) in zip(statistics, pairs, strict=True)
        ]
    return statistics


def _derivatives(
    contributions: Callable[[Sequence[Statistics]], Iterable[Call]], statistics: Sequence[Statistics]
) -> list[Summed]:
    """Return the sums over all chunks of dL/d mean and dL/d variance of each batch norm, by turns."""
    tensors = [x for one in statistics for x in (one.mean, one.variance)]
    count = len(trees.flatten(list(statistics))[0])

    def derivatives(chunk: Call) -> list[Summed]:
        def loss(values: Sequence[Tensor]) -> tuple[Tensor, object]:
            triples = zip(statistics, values[::2], values[1::2], strict=True)
            moved = [Statistics(mean, variance, *one[2:]) for one, mean, variance in triples]
            return chunk.loss(chunk.params, [*chunk.leaves[:-count], *trees.flatten(moved)[0]])

        _, _, grads = chunk.loss.params.unchanged(lambda: naive.value_and_grad(loss, tensors))
        return [Summed(torch.zeros_like(x) if g is None else g) for x, g in zip(tensors, grads, strict=True)]

    return merge_all(map(derivatives, contributions(statistics)))
