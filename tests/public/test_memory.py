"""What is held in memory, counted in bytes of torch's allocator, never timed."""

from __future__ import annotations

import pytest
import torch

import persample as ps
from persample import per_sample_grads
from persample.utils.measure import allocations, peak_memory

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


# Promise 5: what is larger than its factors is not written out, and nothing else of its size is allocated

SAMPLES = 32


def mlp():
    model = torch.nn.Sequential(torch.nn.Linear(600, 512), torch.nn.Tanh(), torch.nn.Linear(512, 400))
    return model, (torch.randn(SAMPLES, 600),), lambda m, x: m(x).square().sum(), 512 * 600


def few_steps():
    model = torch.nn.Linear(700, 600, bias=False)
    return model, (torch.randn(SAMPLES, 3, 700),), lambda m, x: m(x).square().sum(), 600 * 700


def convolution():
    model = torch.nn.Conv2d(256, 256, 3, bias=False)
    return model, (torch.randn(SAMPLES, 256, 4, 4),), lambda m, x: m(x[None]).square().sum(), 256 * 256 * 9


def embedding():
    model = torch.nn.Embedding(20_000, 16)
    return model, (torch.randint(20_000, (SAMPLES, 5)),), lambda m, t: m(t).square().sum(), 20_000 * 16


def tied():
    def loss(m, t):
        return torch.nn.functional.cross_entropy(torch.tanh(m(t[:-1])) @ m.weight.T, t[1:])

    return torch.nn.Embedding(20_000, 16), (torch.randint(20_000, (SAMPLES, 5)),), loss, 20_000 * 16


FACTORED = [mlp, few_steps, convolution, embedding, tied]
CONTRACTED = {
    "Mean": lambda p: ps.Mean(),
    "Sum": lambda p: ps.Sum(),
    "Norm": lambda p: ps.Norm(),
    "Norm-per_param": lambda p: ps.Norm(per_param=True),
    "ClippedMean": lambda p: ps.ClippedMean(1.0),
    "ClippedSum-per_param": lambda p: ps.ClippedSum(1.0, per_param=True),
    "Dot": ps.Dot,
    "Gram": lambda p: ps.Gram(),
    "NaturalGradient": lambda p: ps.NaturalGradient(1.0),
}


@pytest.mark.parametrize("reduction", CONTRACTED)
@pytest.mark.parametrize("make", FACTORED, ids=lambda make: make.__name__)
def test_gradients_larger_than_their_factors_are_not_allocated(make, reduction):
    model, batch, loss, entries = make()
    reduce = CONTRACTED[reduction]({name: p.detach() for name, p in model.named_parameters()})
    written_out = 4 * SAMPLES * entries
    assert largest_allocation(lambda: per_sample_grads(loss, model, batch, reduce)) < written_out / 2
    assert largest_allocation(lambda: per_sample_grads(loss, model, batch, ps.Stack())) >= written_out


def test_a_clipped_mean_of_a_wide_mlp_needs_hardly_more_than_its_batch_gradient():
    model = torch.nn.Sequential(torch.nn.Linear(1280, 640), torch.nn.ReLU(), torch.nn.Linear(640, 320))
    x = torch.randn(8, 1280)
    ordinary = peak_memory(lambda: torch.autograd.grad(model(x).square().mean(), list(model.parameters())))
    ours = peak_memory(lambda: per_sample_grads(lambda m, x: m(x).square().mean(), model, (x,), ps.ClippedMean(1.0)))
    assert ours <= 1.3 * ordinary


def largest_allocation(call):
    return max(allocations(call))


def test_the_measure_sees_the_largest_allocation():
    assert largest_allocation(lambda: (torch.ones(250), torch.ones(10))) == 1000
