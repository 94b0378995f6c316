"""The models and losses that the grid runs over: seeded, small, one per kind of code users write."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from persample import stop_gradient
from persample.losses import reinforce_loss, td_loss


@dataclass(frozen=True)
class Workload:
    loss_fn: Any
    params: Any
    batch: tuple[torch.Tensor, ...]


def _mlp(dtype, *sizes):
    layers = [layer for i, o in itertools.pairwise(sizes) for layer in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(dtype)


def tutorial_td(dtype):
    def loss(theta, s_tm1, r_t, s_t):
        return td_loss(s_tm1 @ theta, r_t, 1.0, s_t @ theta)

    theta = torch.tensor([0.2, -0.2, 0.1], dtype=dtype)
    return Workload(loss, theta, tuple(torch.randn(*shape, dtype=dtype) for shape in ((5, 3), (5,), (5, 3))))


def mlp_td(dtype):
    model = _mlp(dtype, 4, 6, 1)

    def loss(params, s_tm1, r_t, s_t):
        v_tm1, v_t = (functional_call(model, params, s).squeeze(-1) for s in (s_tm1, s_t))
        return td_loss(v_tm1, r_t, 0.9, v_t)

    params = dict(model.named_parameters())
    return Workload(loss, params, tuple(torch.randn(*shape, dtype=dtype) for shape in ((5, 4), (5,), (5, 4))))


def reinforce_episodes(dtype):
    def loss(model, obs_t, a_t, return_t, mask_t):
        return reinforce_loss(model(obs_t), a_t, return_t, mask_t)

    mask = torch.arange(6) < torch.tensor([6, 3, 1, 4, 6])[:, None]
    batch = (torch.randn(5, 6, 4, dtype=dtype), torch.randint(3, (5, 6)), torch.randn(5, 6, dtype=dtype), mask)
    return Workload(loss, _mlp(dtype, 4, 6, 3), batch)


def cnn_group_norm(dtype):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).to(dtype)
    batch = (torch.randn(4, 2, 6, 6, dtype=dtype), torch.randint(3, (4,)))
    return Workload(lambda model, x, y: F.cross_entropy(model(x[None])[0], y), model, batch)


def embedding_attention(dtype):
    def draw(*shape):
        return torch.randn(*shape, dtype=dtype) / 2

    params = {"embed": draw(7, 4), "qkv": draw(4, 12), "out": draw(4, 7)}

    def loss(params, tokens):
        x = F.embedding(tokens[:-1], params["embed"])
        q, k, v = (x @ params["qkv"]).chunk(3, dim=-1)
        future = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
        weights = torch.softmax((q @ k.mT / 2).masked_fill(future, -torch.inf), dim=-1)
        return F.cross_entropy(weights @ v @ params["out"], tokens[1:])

    return Workload(loss, params, (torch.randint(7, (4, 6)),))


def gru_cell_loop(dtype):
    def draw(*shape):
        return torch.randn(*shape, dtype=dtype) / 2

    params = {"cell": {"w_ih": draw(9, 2), "w_hh": draw(9, 3), "b": draw(9)}, "head": draw(3)}

    def loss(params, x_t, y):
        h = x_t.new_zeros(3)
        for x in x_t:
            i = params["cell"]["w_ih"] @ x + params["cell"]["b"]
            g = params["cell"]["w_hh"] @ h
            r, z = torch.sigmoid(i[:3] + g[:3]), torch.sigmoid(i[3:6] + g[3:6])
            h = (1 - z) * torch.tanh(i[6:] + r * g[6:]) + z * h
        return (h @ params["head"] - y) ** 2

    return Workload(loss, params, (torch.randn(4, 5, 2, dtype=dtype), torch.randn(4, dtype=dtype)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


def tied_weights(dtype):
    batch = (torch.randint(6, (4, 5)),)
    return Workload(lambda model, t: F.cross_entropy(model(t[:-1]), t[1:]), Tied().to(dtype), batch)


def nested_params(dtype):
    def loss(params, x):
        hidden = torch.relu(params["net"][0]["w"] @ x + params["net"][0]["b"])
        return (hidden @ params["net"][1] - stop_gradient(params["scale"])) ** 2 * params["scale"]

    net = [{"w": torch.randn(4, 3, dtype=dtype), "b": torch.randn(4, dtype=dtype)}, torch.randn(4, dtype=dtype)]
    return Workload(loss, {"net": net, "scale": torch.tensor(0.7, dtype=dtype)}, (torch.randn(5, 3, dtype=dtype),))


def complex_params(dtype):
    params = {"w": torch.randn(3, 2, dtype=dtype.to_complex()), "b": torch.randn(3, dtype=dtype)}
    batch = (torch.randn(4, 2, dtype=dtype),)
    return Workload(lambda p, x: ((p["w"] @ x.to(p["w"].dtype)).abs() ** 2 + p["b"] * x[0]).sum(), params, batch)


WORKLOADS = {
    fn.__name__: fn
    for fn in (
        tutorial_td,
        mlp_td,
        reinforce_episodes,
        cnn_group_norm,
        embedding_attention,
        gru_cell_loop,
        tied_weights,
        nested_params,
        complex_params,
    )
}


def build(name, dtype=torch.float64, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return WORKLOADS[name](dtype)
