"""What is held in memory, counted in bytes of torch's allocator, never timed."""

from __future__ import annotations

import pytest
import torch

import persample as ps
from persample import per_sample_grads
from persample.cli.measure import peak_memory

B, P = 128, 10_000
ROW = 4 * P  # bytes of one gradient

NEED_ONE_CHUNK = {
    "Mean": ps.Mean(),
    "ClippedMean": ps.ClippedMean(1.0),
    "WeightedSum": ps.WeightedSum(torch.exp),
    "Norm": ps.Norm(),
    "Dot": ps.Dot(torch.ones(P)),
    "SecondMoment": ps.SecondMoment(),
    "Variance": ps.Variance(),
    "NoiseScale": ps.NoiseScale(),
    "several": {"update": ps.ClippedMean(1.0), "norms": ps.Norm(), "noise": ps.NoiseScale()},
}


def peak(reduction, chunk_size, engine="eager", batch_size=B):
    params, x = torch.zeros(P), torch.ones(batch_size, 1)

    def loss(w, x):
        return (w * x).sum()

    return peak_memory(lambda: per_sample_grads(loss, params, x, reduction, chunk_size=chunk_size, engine=engine))


@pytest.mark.parametrize("engine", ["eager", "loop"])
@pytest.mark.parametrize("name", NEED_ONE_CHUNK)
def test_memory_follows_the_chunk_and_not_the_batch(name, engine):
    reduction = NEED_ONE_CHUNK[name]
    chunked = peak(reduction, 4, engine)
    assert chunked < B * ROW / 2
    assert peak(reduction, 4, engine, batch_size=2 * B) < chunked + 2 * ROW
    assert peak(reduction, None, engine) >= B * ROW


def test_stacking_in_chunks_holds_the_result_and_its_pieces():
    assert B * ROW <= peak(ps.Stack(), 4) < 2.5 * B * ROW
