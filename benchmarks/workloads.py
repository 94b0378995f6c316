"""What the benchmarks run on: seeded models, the loss of one sample, and the same loss batched by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from persample import stop_gradient
from persample.losses import reinforce_loss, td_loss


@dataclass(frozen=True)
class Workload:
    """A model with its loss.

    Args:
        model: what is differentiated.
        loss_fn: the loss of one sample: (model, *sample) → ``[]``.
        batch_loss: the mean loss, batched by hand as one would write it: (model, *batch) → ``[]``.
        batch: tensors with a leading batch axis.
    """

    model: nn.Module
    loss_fn: Callable[..., Any]
    batch_loss: Callable[..., Any]
    batch: tuple[torch.Tensor, ...]


def _mlp(*sizes, activation=nn.Tanh):
    pairs = itertools.pairwise(sizes)
    layers = [layer for i, o in pairs for layer in (nn.Linear(i, o), activation())]
    return nn.Sequential(*layers[:-1])


def td_mlp(batch_size, hidden=256):
    def loss(model, s_tm1, r_t, s_t):
        v_tm1, v_t = (model(s).squeeze(-1) for s in (s_tm1, s_t))
        return td_loss(v_tm1, r_t, 0.99, v_t)

    batch = (torch.randn(batch_size, 8), torch.randn(batch_size), torch.randn(batch_size, 8))
    return Workload(_mlp(8, hidden, hidden, 1), loss, lambda *args: loss(*args).mean(), batch)


def reinforce_mlp(episodes=32, steps=200, hidden=64):
    model = _mlp(8, hidden, hidden, 4)
    return _reinforce(model, episodes, steps)


class _GRUPolicy(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = nn.GRU(8, 64, batch_first=True)
        self.head = nn.Linear(64, 4)

    def forward(self, obs_t):
        return self.head(self.memory(obs_t)[0])


def gru_policy(episodes=32, steps=50):
    return _reinforce(_GRUPolicy(), episodes, steps)


def _reinforce(model, episodes, steps):
    def loss(model, obs_t, a_t, return_t):
        return reinforce_loss(model(obs_t), a_t, return_t)

    def batch_loss(model, obs_t, a_t, return_t):
        log_pi = torch.log_softmax(model(obs_t), -1).gather(-1, a_t[..., None]).squeeze(-1)
        return -(log_pi * return_t).sum(1).mean()

    batch = (torch.randn(episodes, steps, 8), torch.randint(4, (episodes, steps)), torch.randn(episodes, steps))
    return Workload(model, loss, batch_loss, batch)


def dqn_cnn(batch_size=32):
    def network():
        convolutions = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3)]
        return nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 6))

    target_network = network()

    def loss(model, s_tm1, a_tm1, r_t, s_t):
        target = r_t + 0.99 * target_network(s_t[None])[0].max()
        return F.smooth_l1_loss(model(s_tm1[None])[0].gather(0, a_tm1[None])[0], stop_gradient(target))

    def batch_loss(model, s_tm1, a_tm1, r_t, s_t):
        with torch.no_grad():
            target = r_t + 0.99 * target_network(s_t).max(1).values
        return F.smooth_l1_loss(model(s_tm1).gather(1, a_tm1[:, None])[:, 0], target)

    images = (torch.rand(batch_size, 4, 84, 84) for _ in range(2))
    batch = (next(images), torch.randint(6, (batch_size,)), torch.randn(batch_size), next(images))
    target_network.requires_grad_(requires_grad=False)
    return Workload(network(), loss, batch_loss, batch)


class _Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = _mlp(width, 4 * width, width, activation=nn.GELU)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-3, -2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class _Transformer(nn.Module):
    def __init__(self, vocabulary, length, width=128, layers=4):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) / 50)
        self.blocks = nn.Sequential(*(_Block(width, heads=4) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens):
        return F.linear(self.norm(self.blocks(self.embed(tokens) + self.position)), self.embed.weight)  # tied


def transformer(vocabulary=2000, batch_size=16, length=128):
    def loss(model, tokens):
        return F.cross_entropy(model(tokens[:-1]), tokens[1:])

    def batch_loss(model, tokens):
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    batch = (torch.randint(vocabulary, (batch_size, length + 1)),)
    return Workload(_Transformer(vocabulary, length), loss, batch_loss, batch)


def wide_mlp(batch_size=32):
    def loss(model, x, y):
        return F.mse_loss(model(x), y)

    batch = (torch.randn(batch_size, 5120), torch.randn(batch_size, 1280))
    return Workload(_mlp(5120, 2560, 1280, activation=nn.ReLU), loss, loss, batch)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "TD(0) MLP 64, B=256": lambda: td_mlp(256, hidden=64),
    "TD(0) MLP 256, B=256": lambda: td_mlp(256),
    "TD(0) MLP 256, B=1024": lambda: td_mlp(1024),
    "REINFORCE MLP 64, 32x200": reinforce_mlp,
    "REINFORCE MLP 256, 32x200": lambda: reinforce_mlp(hidden=256),
    "REINFORCE GRU 64, 32x50": gru_policy,
    "DQN Nature CNN, B=32": dqn_cnn,
    "transformer, vocabulary 2000, B=16": transformer,
    "transformer, vocabulary 32000, B=16": lambda: transformer(32000),
    "MLP 5120-2560-1280, B=32": wide_mlp,
}


def build(name: str) -> Workload:
    torch.manual_seed(0)
    return WORKLOADS[name]()
