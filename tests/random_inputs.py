"""Parameters and batches of random programs: trees of tensors of all kinds, and how a program reaches each leaf."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from persample.utils.numerics import laid_out


class Pair(NamedTuple):
    first: Any
    second: Any


PARAM_SHAPES = [
    (),
    (3,),
    (2,),
    (4,),
    (3, 2),
    (2, 3),
    (3, 3),
    (2, 2),
    (4, 3),
    (5, 2),
    (2, 3, 2),
    (2, 2, 3),
    (3, 2, 3),
    (3, 2, 2),
    (2, 2, 2, 2),
    (3, 1, 2),
]
SAMPLE_SHAPES = [
    (),
    (2,),
    (3,),
    (4,),
    (3, 2),
    (2, 3),
    (4, 2),
    (2, 2),
    (3, 3),
    (2, 2, 3),
    (2, 5),
    (2, 4, 4),
    (3, 2, 4),
    (2, 1, 3),
]
EMPTY = [(0,), (0, 2), (2, 0)]
INDEX_SHAPES = [(), (), (2,), (3,), (2, 2), (3, 1)]


@dataclass(frozen=True)
class Leaf:
    """A tensor, and the axis that counts the samples, or None."""

    value: Any
    dim: int | None = None

    def row(self, i):
        return self.value if self.dim is None else torch.as_tensor(self.value).select(self.dim, i)

    def rows(self, places):
        if self.dim is None:
            return self.value
        x = torch.as_tensor(self.value)
        rows = x.index_select(self.dim, torch.as_tensor(places, dtype=torch.long))
        return laid_out(rows, x)  # what torch accepts may depend on the layout


def draw_shape(rng, shapes):
    return rng.choice(EMPTY) if rng.random() < 0.02 else rng.choice(shapes)


def spread_out(rng, x):
    """The same numbers in memory of another order."""
    kind = rng.randrange(6)
    if kind == 0 and x.ndim > 1:
        return x.transpose(-1, 0).contiguous().transpose(-1, 0)
    if kind == 1 and x.numel():
        return torch.stack([x, x + 1], -1)[..., 0]
    return x


def batched(rng, size, shape, fill):
    """A leaf of one row per sample."""
    x = fill(size, *shape)
    if size and rng.random() < 0.05:
        x = x[:1].expand(size, *shape)
    x = spread_out(rng, x)
    dim = rng.randrange(-x.ndim, x.ndim) if rng.random() < 0.2 else 0
    return Leaf(x.movedim(0, dim), dim)


def filler(rng, generator, dtype, scale=1.0):
    if dtype == torch.long:
        return lambda *shape: torch.randint(0, 6, shape, generator=generator)
    if dtype == torch.bool:
        return lambda *shape: torch.rand(shape, generator=generator) < 0.6
    return lambda *shape: scale * torch.randn(shape, generator=generator, dtype=dtype)


def arrange(rng, places, access, *, kinds=(dict, tuple, list, Pair), top=True):
    """Put leaves into nested containers; returns the tree of their numbers, and how each is reached."""
    if len(places) == 1 and (not top or rng.random() < 0.3):
        return places[0], {places[0]: access}
    kind = rng.choice([k for k in kinds if k is not Pair or len(places) > 1])
    count = 2 if kind is Pair else rng.randint(1, len(places))
    cuts = [0, *sorted(rng.sample(range(1, len(places)), count - 1)), len(places)]
    keys = (
        ["first", "second"]
        if kind is Pair
        else rng.sample(["a", "b", "c", "d", "e", "f", "g"], count)
        if kind is dict
        else range(count)
    )
    parts, reached = [], {}
    for key, start, stop in zip(keys, cuts, cuts[1:], strict=False):
        inner = f"{access}.{key}" if kind is Pair else f"{access}[{key!r}]"
        part, below = arrange(rng, places[start:stop], inner, top=False)
        parts.append(part)
        reached.update(below)
    tree = Pair(*parts) if kind is Pair else dict(zip(keys, parts, strict=True)) if kind is dict else kind(parts)
    return tree, reached


class Net(nn.Module):
    """Layers, a parameter of its own, one that is tied, one that is frozen."""

    def __init__(self, rng, dtype):
        super().__init__()
        self.calls = {}
        for place in range(rng.randint(1, 3)):
            name, (layer, called) = f"layer{place}", draw_layer(rng)
            self.add_module(name, layer)
            self.calls[name] = called
        self.own = nn.Parameter(torch.randn(draw_shape(rng, PARAM_SHAPES)))
        if rng.random() < 0.3:
            self.tied = self.own
        if rng.random() < 0.3:
            self.layer0.requires_grad_(requires_grad=False)
        self.register_buffer("scale", torch.rand(2))
        self.to(dtype).eval()


def draw_layer(rng):
    i, o = rng.randint(2, 4), rng.randint(2, 4)
    return rng.choice(
        [
            lambda: (nn.Linear(i, o, bias=rng.random() < 0.7), f"({{A:{i}}})"),
            lambda: (nn.Linear(i, o), f"({{A:k{i}}})"),
            lambda: (nn.Sequential(nn.Linear(i, o), nn.Tanh(), nn.Linear(o, 2)), f"({{A:{i}}})"),
            lambda: (nn.Sequential(nn.Linear(i, o), nn.ReLU(), nn.Linear(o, 2)), f"({{A:k{i}}})"),
            lambda: (nn.Embedding(5, i), "({I:k<5})"),
            lambda: (nn.Embedding(5, i, padding_idx=1), "({I:<5})"),
            lambda: (nn.Conv1d(2, o, 2), "({A:24})"),
            lambda: (nn.Conv2d(2, o, 2, padding=1), "({A:n233})"),
            lambda: (nn.LayerNorm(i), f"({{A:k{i}}})"),
            lambda: (nn.GroupNorm(1, 2), "({A:n2k})"),
            lambda: (nn.GRU(i, 2), f"({{A:k{i}}})[0]"),
            lambda: (nn.LSTM(i, 2, batch_first=True), f"({{A:nk{i}}})[0]"),
            lambda: (nn.RNN(i, 2, nonlinearity="relu"), f"({{A:k{i}}})[1]"),
            lambda: (nn.GRUCell(i, 2), f"({{A:{i}}}, {{B:2}})"),
            lambda: (nn.Bilinear(i, o, 2), f"({{A:{i}}}, {{B:{o}}})"),
            lambda: (nn.MultiheadAttention(2, 1), "({A:k2}, {B:l2}, {B})[0]"),
            lambda: (nn.TransformerEncoderLayer(2, 1, 3, dropout=0.0, batch_first=True), "({A:1k2})"),
            lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(i, o)), f"({{A:{i}}})"),
            lambda: (nn.EmbeddingBag(5, i, mode="sum"), "({I:bk<5})"),
            lambda: (nn.PReLU(), f"({{A:{i}}})"),
        ]
    )()


def named(module):
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def is_module(x):
    return isinstance(x, nn.Module)


def result_tree(params):
    """The tree that gradients come in: modules stand as dicts of their parameters."""
    return pytree.tree_map(lambda x: named(x) if is_module(x) else x, params, is_leaf=is_module)


def differentiable(params, change=lambda x: x):
    """A copy of parameters of one sample whose leaves require grad; beside it these leaves."""

    def fresh(x):
        if not is_module(x):
            return change(x.detach().clone()).requires_grad_()
        x = copy.deepcopy(x)
        with torch.no_grad():
            for p in x.parameters():
                p.data = change(p.detach().clone())
        return x

    own = pytree.tree_map(fresh, params, is_leaf=is_module)
    return own, pytree.tree_leaves(result_tree(own))
