"""A loss of all samples: the plain graph, torch's checkpoints, and two passes: ``make bench``.

Every ratio is within one group (a model at one n) and one run. ``peak_mib`` is the largest sum of bytes that torch's
allocator held beyond what it held before, in one call. The loss is a list-wise softmax over the scores, linear in n, so
that what grows with n is the encoder's; z itself is n × 16 numbers.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks import models
from persample import composite_grads
from persample.utils.measure import peak_memory

CHUNK = 64


def mlp(n):
    return models.mlp(64, 512, 512, 16), torch.randn(n, 64), lambda model, x: model(x)


def small_transformer(n):
    """Two blocks of width 64 over 32 tokens; the first 16 logits of the last token are z."""
    model = models.Transformer(vocabulary=256, length=32, width=64, layers=2, heads=4)
    return model, torch.randint(256, (n, 32)), lambda model, tokens: model(tokens)[..., -1, :16]


def list_wise(z):
    target = torch.softmax(z[:, 0].detach(), 0)
    return -(target * torch.log_softmax(z[:, 1:].square().sum(1), 0)).sum()


def plain_graph(model, x, encode):
    return torch.autograd.grad(list_wise(encode(model, x)), list(model.parameters()))


def checkpointed(model, x, encode):
    z = [checkpoint(encode, model, chunk, use_reentrant=False) for chunk in x.split(CHUNK)]
    return torch.autograd.grad(list_wise(torch.cat(z)), list(model.parameters()))


def two_passes(**options):
    return lambda model, x, encode: composite_grads(encode, list_wise, model, x, **options)


METHODS = {
    "plain graph (unit)": plain_graph,
    "torch checkpoint, chunks of 64": checkpointed,
    "composite_grads, batched, chunks of 64": two_passes(batched=True, chunk_size=CHUNK),
    "composite_grads, vmap, chunks of 64": two_passes(chunk_size=CHUNK),
}
MODELS = {"MLP 64-512-512-16": mlp, "small transformer": small_transformer}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [16, 64, 256, 1024, 4096])
@pytest.mark.parametrize("model", MODELS)
def test_composite(benchmark, model, n, method):
    torch.manual_seed(0)
    work = MODELS[model](n)
    benchmark.group = f"{model}, n={n}"
    benchmark.pedantic(METHODS[method], args=work, rounds=3 if n > 1000 else 7, warmup_rounds=1)
    benchmark.extra_info["peak_mib"] = round(peak_memory(lambda: METHODS[method](*work)) / 2**20, 2)
