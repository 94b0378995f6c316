"""Kronecker factors equal those of loops that tap every layer, and curvlinops' where it knows the layers."""

from __future__ import annotations

import warnings

import pytest
import torch
from oracle import assert_trees_close
from torch import nn
from torch.nn import functional as F

from persample import ArgumentError, ClippedMean, KroneckerFactors, Stack, accumulate, explain, per_sample_grads
from persample.losses import td_loss
from persample.reductions import KroneckerFactor

BOTH = pytest.mark.parametrize("approximation", ["expand", "reduce"])
PATHS = [{}, {"chunk_size": 2}, {"engine": "loop"}, {"engine": "loop", "chunk_size": 3}]


class Tape:
    """Plain products whose inputs and outputs are remembered, use after use of a parameter."""

    def __init__(self):
        self.uses = []

    def linear(self, x, w, b=None):
        y = x @ w.T
        y = y if b is None else y + b
        y.retain_grad()
        self.uses += [(w, x, y)] if b is None else [(w, x, y), (b, torch.ones_like(y[..., :1]), y)]
        return y

    def lookup(self, index, table):
        y = table[index]
        y.retain_grad()
        self.uses.append((table, (index, len(table)), y))
        return y


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def expected_of(loss, params, batch, approximation, weights=None):
    """S and A by their definitions: one sample after the other, one term after the other."""
    size = len(batch[0])
    weights = torch.ones(size).double() if weights is None else weights
    params = {name: p.clone().requires_grad_() for name, p in params.items()}
    totals = {name: [0, 0, 0] for name in params}
    for weight, *sample in zip(weights, *batch, strict=True):
        tape = Tape()
        loss(params, *sample, tape).backward()
        for name, p in params.items():
            terms = []
            for q, x, y in tape.uses:
                if q is not p or y.grad is None:
                    continue
                if isinstance(x, tuple):  # the rows of a table lie along the first axis
                    rows = F.one_hot(x[0].reshape(-1), x[1]).double()
                    terms += zip(rows, y.grad.reshape(-1, y.shape[-1]), strict=True)
                else:
                    x, grad = (z.detach().reshape(-1, z.shape[-1]) for z in (x, y.grad))
                    terms += zip(grad, x, strict=True)
            if approximation == "reduce":
                lefts, rights = zip(*terms, strict=True)
                terms, count = [(sum(lefts), sum(rights) / len(terms))], 1
            else:
                count = len(terms)
            for left, right in terms:
                totals[name][0] += weight * torch.outer(left, left)
                totals[name][1] += weight * torch.outer(right, right)
            totals[name][2] += weight * count
    return {name: KroneckerFactor(a / n, s / weights.sum()) for name, (s, a, n) in totals.items()}


class Plain:
    """The same products as the library sees them, in the spelling of a model."""

    def __init__(self, spelling=F.linear):
        self.linear, self.lookup = spelling, lambda index, table: F.embedding(index, table)


def mlp(p, x, y, layers):
    return F.cross_entropy(layers.linear(torch.tanh(layers.linear(x, p["w1"], p["b1"])), p["w2"], p["b2"]), y)


def recurrent(p, x_t, y, layers):
    h, total = x_t.new_zeros(3), 0
    for x in x_t:
        h = torch.tanh(layers.linear(x, p["w_ih"], p["b"]) + layers.linear(h, p["w_hh"]))
        total = total + (layers.linear(h, p["head"])[0] - y).square()
    return total


def tied(p, tokens, layers):
    x = layers.lookup(tokens, p["table"])
    x = x + layers.linear(torch.tanh(layers.linear(x, p["up"])), p["down"])
    return F.cross_entropy(layers.linear(x, p["table"])[:-1], tokens[1:], reduction="sum")


def scaled(p, x, y, layers):
    hidden = torch.tanh(layers.linear(x, p["w"]) * 0.5)
    return (layers.linear(hidden, p["v"])[..., 0].mean() - y).square()


def td(p, s_tm1, r_t, s_t, layers):
    def value(s):
        return layers.linear(torch.tanh(layers.linear(s, p["w"], p["b"])), p["v"])[0]

    return td_loss(value(s_tm1), r_t, 0.9, value(s_t))


def sizes(**shapes):
    return {name: draw(*shape, seed=place) / 2 for place, (name, shape) in enumerate(shapes.items())}


LABELS = torch.tensor([0, 2, 1, 1, 0])
MODELS = {
    "mlp": (mlp, sizes(w1=(4, 3), b1=(4,), w2=(3, 4), b2=(3,)), (draw(5, 3), LABELS)),
    "recurrent": (
        recurrent,
        sizes(w_ih=(3, 2), b=(3,), w_hh=(3, 3), head=(1, 3)),
        (draw(5, 4, 2), draw(5, seed=9)),
    ),
    "tied": (tied, sizes(table=(7, 4), up=(6, 4), down=(4, 6)), (torch.randint(7, (5, 4)),)),
    "scaled": (scaled, sizes(w=(4, 3), v=(1, 4)), (draw(5, 6, 3), draw(5, seed=9))),
    "td": (td, sizes(w=(4, 3), b=(4,), v=(1, 4)), (draw(5, 3), draw(5, seed=9), draw(5, 3, seed=7))),
}


@pytest.mark.parametrize("options", PATHS, ids=str)
@BOTH
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_loops_over_terms(name, approximation, options):
    loss, params, batch = MODELS[name]
    found, _ = per_sample_grads(
        lambda p, *sample: loss(p, *sample, Plain()),
        params,
        batch,
        (KroneckerFactors(approximation), ClippedMean(1.0)),
        **options,
    )
    assert_trees_close(found, expected_of(loss, params, batch, approximation), 1e-9)
