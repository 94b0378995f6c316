"""Passes that contract factors layer by layer, and blocks that torch computes again in the backward pass."""

import pytest
import torch
from oracle import assert_trees_close
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from persample import ClippedMean, Gram, Mean, Norm, TermNorm, Variance, WeightedSum, per_sample_grads
from persample.factors.cost_model import BLOCK
from persample.utils.measure import peak_memory

WIDTH, VOCABULARY = 16, 40


class Language(nn.Module):
    """Blocks with residuals, with one table for words and logits; ``run`` computes a block."""

    def __init__(self, run=None, blocks=3, width=WIDTH, hidden=2 * WIDTH, scaled=False):
        super().__init__()
        self.run, self.table = run, nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in range(blocks)
        )
        self.scale = nn.Parameter(torch.rand(width, width)) if scaled else None

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = x + (block(x) if self.run is None else self.run(block, x))
        if self.scale is not None:
            x = x @ torch.tanh(self.scale)  # a parameter that the loss computes
        return F.linear(x, self.table.weight)


def again(block, x):
    return checkpoint(block, x, use_reentrant=False)


def nested(block, x):
    return checkpoint(lambda x: again(block[1:], block[0](x)), x, use_reentrant=False)


def offloaded(block, x):
    with save_on_cpu():
        return block(x)


def loss(model, ids):
    return F.cross_entropy(model(ids[:-1]), ids[1:])


REDUCTIONS = {
    "norm": Norm(),
    "norms": Norm(per_param=True),
    "clipped": {"update": ClippedMean(0.5), "norms": Norm(), "mean": Mean()},
    "weighted": WeightedSum(lambda norm: 1 / norm, per_param=True),
    "metric": ClippedMean(
        0.5, metric={name: 1 + p.detach() ** 2 for name, p in Language().double().named_parameters()}
    ),
    "rows": None,
    "gram": Gram(),
    "variance": Variance(),
}
RUNS = {"checkpoint": (again, None), "low": (again, "low"), "nested": (nested, None), "offloaded": (offloaded, None)}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_are_those_of_the_loop(reduction, run):
    torch.manual_seed(0)
    model, ids = Language().double(), torch.randint(VOCABULARY, (4, 9))
    weights = None if reduction == "gram" else torch.tensor([1.0, 0.0, 2.0, 0.5])
    expected = per_sample_grads(loss, model, ids, REDUCTIONS[reduction], weights=weights, engine="loop")
    model.run, memory = RUNS[run]
    for chunk_size in (None, 3):
        options = {"weights": weights, "memory": memory, "chunk_size": chunk_size}
        found = per_sample_grads(loss, model, ids, REDUCTIONS[reduction], **options)
        assert_trees_close(found, expected, 1e-9)
    assert all(p.grad is None for p in model.parameters())


def test_parameters_that_the_loss_computes():
    torch.manual_seed(0)
    model, ids = Language(scaled=True).double(), torch.randint(VOCABULARY, (4, 9))
    expected = per_sample_grads(loss, model, ids, REDUCTIONS["clipped"], engine="loop")
    model.run = again
    assert_trees_close(per_sample_grads(loss, model, ids, REDUCTIONS["clipped"]), expected, 1e-9)


def test_terms_are_in_the_order_of_the_uses():
    w, x = torch.randn(4, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)

    def used_twice(run):
        def loss(w, x):
            return F.linear(run(lambda h: F.linear(h, w).tanh(), x), w).square().sum()

        return loss

    terms = per_sample_grads(used_twice(again), w, x, TermNorm())
    assert_trees_close(terms, per_sample_grads(used_twice(lambda f, h: f(h)), w, x, TermNorm(), engine="loop"), 1e-9)


def test_passes_draw_the_same_random_numbers():
    model, ids = Language().double(), torch.randint(VOCABULARY, (4, 9))
    model.blocks[1].append(nn.Dropout(0.5))

    def found(run):
        model.run = run
        torch.manual_seed(1)
        update = per_sample_grads(loss, model, ids, ClippedMean(0.5), randomness="different")
        return update, torch.rand(3)

    assert_trees_close(found(again), found(None), 1e-9)


def test_memory_falls_with_checkpoints_as_that_of_the_batch_gradient():
    """Bytes of torch's allocator, the same in every run; blocks of written-out gradients come on top."""
    torch.manual_seed(0)
    model, ids = Language(blocks=12, width=64, hidden=512), torch.randint(VOCABULARY, (2, 513))

    def batch_gradient():
        logits = model(ids[:, :-1]).flatten(0, 1)
        return torch.autograd.grad(F.cross_entropy(logits, ids[:, 1:].flatten()), list(model.parameters()))

    def ours():
        return peak_memory(lambda: per_sample_grads(loss, model, ids, ClippedMean(0.5)))

    kept = ours()
    model.run = again
    peak, found = peak_memory(batch_gradient), ours()
    assert found <= peak + 24 * BLOCK < 0.6 * kept
