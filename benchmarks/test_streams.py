"""``accumulate`` beside one call of ``per_sample_grads`` for each batch: ``make bench``. The aim is a ratio of 1.05.

The calls keep nothing: to merge their results is part of what ``accumulate`` does in the same time.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks import models
from persample import ClippedMean, Variance, accumulate, per_sample_grads

BATCHES = [20, 80]
MODELS = {"MLP 8-64-64-1": (8, 64, 64, 1), "MLP 8-256-256-1": (8, 256, 256, 1), "MLP 8-512-512-1": (8, 512, 512, 1)}
REDUCTIONS = {"clipped mean": ClippedMean(1.0), "variance": Variance()}


def loss(model, x):
    return model(x).square().sum()


def plain(model, batches, reduction, engine):
    for x in batches:
        per_sample_grads(loss, model, x, reduction, engine=engine)  # nor does ``accumulate`` keep the result of a batch


def streamed(model, batches, reduction, engine):
    return accumulate(loss, model, batches, reduction, engine=engine)


@pytest.mark.parametrize("method", [plain, streamed], ids=lambda method: method.__name__)
@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("number", BATCHES)
@pytest.mark.parametrize("model", MODELS)
def test_overhead(benchmark, model, number, reduction, engine, method):  # noqa: PLR0917
    benchmark.group = f"{model}, {number} batches of 256, {reduction}, {engine}"
    sizes = MODELS[model]
    torch.manual_seed(0)
    batches = torch.randn(number * 256, sizes[0]).split(256)
    arguments = models.mlp(*sizes), batches, REDUCTIONS[reduction], engine
    benchmark.pedantic(method, arguments, warmup_rounds=1, rounds=15)
