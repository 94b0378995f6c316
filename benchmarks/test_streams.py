"""``accumulate`` beside one call of ``per_sample_grads`` for each batch: ``make bench``. The aim is a ratio of 1.05.

``plain`` calls keep nothing: to merge their results is part of what ``accumulate`` does in the same time. ``summed``
calls add their results up in float64, as a user would who has no ``accumulate``.
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


def summed(model, batches, reduction, engine):
    first, *others = batches
    total = {name: x.double() for name, x in per_sample_grads(loss, model, first, reduction, engine=engine).items()}
    for x in others:
        for name, result in per_sample_grads(loss, model, x, reduction, engine=engine).items():
            total[name].add_(result)
    return {name: x.div_(len(batches)).float() for name, x in total.items()}


def streamed(model, batches, reduction, engine):
    return accumulate(loss, model, batches, reduction, engine=engine)


# Variances of batches do not add up.
CASES = [*((name, method) for name in REDUCTIONS for method in (plain, streamed)), ("clipped mean", summed)]


@pytest.mark.parametrize(("reduction", "method"), CASES, ids=lambda x: x if isinstance(x, str) else x.__name__)
@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.parametrize("number", BATCHES)
@pytest.mark.parametrize("model", MODELS)
def test_overhead(benchmark, model, number, reduction, engine, method):  # noqa: PLR0917
    benchmark.group = f"{model}, {number} batches of 256, {reduction}, {engine}"
    sizes = MODELS[model]
    torch.manual_seed(0)
    batches = torch.randn(number * 256, sizes[0]).split(256)
    arguments = models.mlp(*sizes), batches, REDUCTIONS[reduction], engine
    benchmark.pedantic(method, arguments, warmup_rounds=1, rounds=15)
