"""Losses that couple samples, small encoders, and the plain graph of all samples that ours is compared with."""

from __future__ import annotations

import torch
from oracle import assert_trees_close
from torch import nn
from torch.nn import functional as F

F64 = torch.float64
EXACT = 1e-9


def draw(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def build(make, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().double()


def mlp(dropout=0.0):
    return build(
        lambda: nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 4))
    )


def uniformity(z):
    """Couples all samples with all others."""
    return torch.logsumexp((z @ z.mT).flatten(), 0)


def info_nce(log_scale, z):
    q, p = F.normalize(z["query"], dim=-1), F.normalize(z["passage"], dim=-1)
    return F.cross_entropy(log_scale.exp() * q @ p.mT, torch.arange(len(q)))


def graph(loss, z, params, loss_params=None):
    """The plain graph: one backward pass through everything. ``params`` is a module or a tree of leaves."""
    named = dict(params.named_parameters()) if isinstance(params, nn.Module) else params
    named = {name: p for name, p in named.items() if p.requires_grad}
    own = [] if loss_params is None else [loss_params]
    value = loss(*own, z)
    grads = torch.autograd.grad(value, [*named.values(), *own], allow_unused=True, materialize_grads=True)
    tree = dict(zip(named, grads, strict=False))
    return value.detach(), tree if loss_params is None else (tree, grads[-1])


def assert_same(actual, expected, rtol=EXACT, atol=1e-13):
    assert_trees_close(actual, expected, rtol, atol)


def encode_pair(towers, query, passage):
    return {"query": towers["query"](query), "passage": towers["passage"](passage)}


def two_towers(*, tied):
    query = mlp()
    return nn.ModuleDict({"query": query, "passage": query if tied else build(lambda: nn.Linear(5, 4), seed=1)})


class Residual(nn.Module):
    """Two batch norms on a path, a third beside it, and dropout between."""

    def __init__(self, momentum=0.1):
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 3, 2), nn.Linear(9, 4)
        self.norm1, self.norm2 = nn.BatchNorm1d(3, momentum=momentum), nn.BatchNorm1d(4, momentum=momentum)
        self.beside, self.drop = nn.BatchNorm1d(2, momentum=momentum, affine=False), nn.Dropout(0.3)

    def forward(self, x):
        h = self.drop(torch.tanh(self.norm1(self.first(x))))
        return self.norm2(self.second(h.flatten(1))) + self.beside(x).mean(-1).repeat(1, 2)
