"""The statistics of all samples for every batch norm, and what L depends on them, while one chunk is in memory."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from persample import naive
from persample.composite.batch_norm import FullBatch, Statistics
from persample.composite.encode import first_pass, whole
from persample.composite.encoder import Tower
from persample.composite.processes import Processes
from persample.composite.replay import Replay
from persample.errors import LossError
from persample.inputs.call import Call
from persample.inputs.loss import SampleLoss
from persample.merge import Moments, Summed, merge
from persample.utils import rng


def solve_statistics(tower: Tower, mode: FullBatch, start: rng.Streams, processes: Processes) -> None:
    """Find the statistics of all batch norms, those of one more in every pass.

    Args:
        tower: the encoder, run under the mode, and its samples.
        mode: receives the statistics.
        start: where the random streams stand before every pass.
        processes: which of them the samples are spread over.

    Raises:
        LossError: if a batch norm sees one number per channel in all, which has no variance.
    """
    while True:
        start.go_back()
        moments = processes.merged(processes.together(lambda: _moments(tower, mode)))
        mode.known = [Statistics.of(one) for one in moments[: len(mode.known) + 1]]
        if any(one.count == 1 for one in mode.known):
            raise LossError(
                "batch_norm='full': expected more than one number per channel, received one (a batch of 1 sample). "
                "Encode more samples, or use .eval()."
            )
        if len(mode.known) == len(moments):
            return


def _moments(tower: Tower, mode: FullBatch) -> list[Moments]:
    total: list[Moments] = []

    def encode(encoder: SampleLoss, samples: Call) -> Any:
        nonlocal total
        z = whole(encoder, samples)
        total = merge(total, mode.seen) if total else mode.seen
        return z

    first_pass(tower, encode)
    return total


def solve_adjoint(losses: Tower, mode: FullBatch, replay: Replay, processes: Processes) -> None:
    """Find how L depends on the statistics of all batch norms, one more from the last to the first in every pass.

    Args:
        losses: ⟨z, dL/dz⟩ and the terms of the mode, and the samples.
        mode: receives the derivatives.
        replay: sets the random streams for every pass.
        processes: which of them the samples are spread over.
    """
    for _ in mode.known:
        by = processes.merged(processes.together(lambda: _derivatives(losses, mode, replay)))
        pairs = zip(by[::2], by[1::2], strict=True)
        mode.known = [
            replace(one, by_mean=by_mean.value, by_variance=by_variance.value)
            for one, (by_mean, by_variance) in zip(mode.known, pairs, strict=True)
        ]


def _derivatives(losses: Tower, mode: FullBatch, replay: Replay) -> list[Summed]:
    known = mode.known
    tensors = [x for one in known for x in (one.mean, one.variance)]
    totals = [Summed(torch.zeros_like(x)) for x in tensors]
    for chunk in replay.over(losses.chunks()):

        def loss(values: list[Tensor], chunk: Call = chunk) -> Any:
            pairs = zip(known, values[::2], values[1::2], strict=True)
            mode.known = [replace(one, mean=mean, variance=variance) for one, mean, variance in pairs]
            return losses.encoder(chunk.params, chunk.leaves)

        _, _, grads = naive.value_and_grad(loss, tensors)
        found = [Summed(torch.zeros_like(x) if g is None else g) for x, g in zip(tensors, grads, strict=True)]
        totals = functools.reduce(merge, (totals, found))
    mode.known = known
    return totals
