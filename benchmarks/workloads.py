"""The workloads: seeded models, the loss of one sample, and the same loss written for the batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace as _replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import models
from benchmarks.sweep import drawn
from benchmarks.sweep.draws import DRAWS
from benchmarks.workload import Workload
from persample import stop_gradient
from persample.losses import discounted_returns, reinforce_loss, td_loss

DISCOUNT = 0.99


def _td_loss(model, s_tm1, r_t, s_t):
    return td_loss(model(s_tm1).squeeze(-1), r_t, DISCOUNT, model(s_t).squeeze(-1))


def _td_batch_loss(model, s_tm1, r_t, s_t):
    target = r_t + DISCOUNT * model(s_t).detach().squeeze(-1)
    return (target - model(s_tm1).squeeze(-1)).square().mean()


def td_linear(batch_size):
    """The tutorial's TD(0), with 3 parameters and no discount: squared TD error of a linear value function."""

    def functional(params, s_tm1, r_t, s_t):
        return (r_t + stop_gradient(s_t @ params["theta"]) - s_tm1 @ params["theta"]) ** 2

    def loss(model, s_tm1, r_t, s_t):
        return (r_t + stop_gradient(model(s_t)) - model(s_tm1)) ** 2

    batch = (torch.randn(batch_size, 3), torch.randn(batch_size), torch.randn(batch_size, 3))
    return Workload(
        "td_linear",
        {"batch_size": batch_size},
        models.LinearValue(3),
        loss,
        lambda *args: loss(*args).mean(),
        batch,
        functional=functional,
    )


def td_mlp(batch_size, hidden):
    batch = (torch.randn(batch_size, 8), torch.randn(batch_size), torch.randn(batch_size, 8))
    sizes = {"batch_size": batch_size, "hidden": hidden, "features": 8}
    return Workload("td_mlp", sizes, models.mlp(8, hidden, hidden, 1), _td_loss, _td_batch_loss, batch)


def reinforce(kind, model, steps, **sizes):
    """REINFORCE on 32 episodes of CartPole: one sample is one episode, padded to ``steps``."""

    def batch_loss(model, obs_t, a_t, return_t, mask_t):
        log_pi = torch.log_softmax(model(obs_t), -1).gather(-1, a_t[..., None]).squeeze(-1)
        return -(log_pi * return_t * mask_t).sum(1).mean()

    def loss(model, obs_t, a_t, return_t, mask_t):
        return reinforce_loss(model(obs_t), a_t, return_t, mask_t)

    batch = cartpole_episodes(32, steps)
    return Workload(kind, {"batch_size": 32, "steps": steps, **sizes}, model, loss, batch_loss, batch)


def cartpole_episodes(episodes, steps):
    """Roll out a hand-written policy: it pushes to where the pole falls, and half of the time at random."""
    from persample.rl import collect_episodes, make_envs  # needs gymnasium

    def act(obs, generator):
        falls_right = (obs[:, 2] + obs[:, 3] > 0).long()
        random = torch.randint(2, falls_right.shape, generator=generator)
        return torch.where(torch.rand(falls_right.shape, generator=generator) < 0.5, random, falls_right)

    rollout = collect_episodes(make_envs("CartPole-v1", 8), act, episodes, discount=DISCOUNT, seed=0, max_steps=steps)
    return_t = discounted_returns(rollout.r_t, rollout.discount_t, 0.0, time_dim=1)
    fields = (rollout.obs_t, rollout.a_t, (return_t - return_t.mean()) / return_t.std(), rollout.mask_t)
    return tuple(_padded(x, steps) for x in fields)


def _padded(x: Tensor, steps: int) -> Tensor:
    padded = x.new_zeros(x.shape[0], steps, *x.shape[2:])
    padded[:, : x.shape[1]] = x
    return padded


def dqn_cnn(batch_size, actions=6):
    target = models.nature_cnn(actions).requires_grad_(requires_grad=False)

    def loss(model, s_tm1, a_tm1, r_t, s_t):
        y = r_t + DISCOUNT * target(s_t[None])[0].max()
        return F.smooth_l1_loss(model(s_tm1[None])[0].gather(0, a_tm1[None])[0], stop_gradient(y))

    def batch_loss(model, s_tm1, a_tm1, r_t, s_t):
        with torch.no_grad():
            y = r_t + DISCOUNT * target(s_t).max(1).values
        return F.smooth_l1_loss(model(s_tm1).gather(1, a_tm1[:, None])[:, 0], y)

    s_tm1, s_t = torch.rand(2, batch_size, 4, 84, 84)
    batch = (s_tm1, torch.randint(actions, (batch_size,)), torch.randn(batch_size), s_t)
    sizes = {"batch_size": batch_size, "actions": actions}
    return Workload("dqn_cnn", sizes, models.nature_cnn(actions), loss, batch_loss, batch, target=target)


def transformer(vocabulary, batch_size, *, length=128, width=128, layers=4, heads=4):
    """Next-token cross-entropy of sequences; each holds ``length`` + 1 tokens."""

    def loss(model, tokens):
        return F.cross_entropy(model(tokens[:-1]), tokens[1:])

    def batch_loss(model, tokens):
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    sizes = {"vocabulary": vocabulary, "length": length, "width": width, "layers": layers, "heads": heads}
    batch = (torch.randint(vocabulary, (batch_size, length + 1)),)
    model = models.Transformer(**sizes)
    return Workload("transformer", {"batch_size": batch_size, **sizes}, model, loss, batch_loss, batch)


def lora(vocabulary, batch_size, rank=8, scale=2.0):
    """The same with adapters; what they update is frozen."""
    base = transformer(vocabulary, batch_size)
    model = models.with_lora(base.model, rank, scale)
    return _replace(base, kind="lora", sizes={**base.sizes, "rank": rank, "scale": scale}, model=model)


def gpt2(batch_size, length, *, held_out=0, **sizes):
    """GPT-2 with 124 million parameters, as transformers has it, without dropout: next-token cross-entropy."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def batch_loss(model, tokens):
        return model(input_ids=tokens, labels=tokens).loss

    def loss(model, tokens):
        return batch_loss(model, tokens.unsqueeze(0))

    config = GPT2Config(use_cache=False, **sizes)
    tokens, others = torch.randint(config.vocab_size, (batch_size + held_out, length)).split([batch_size, held_out])
    sizes = {"batch_size": batch_size, "length": length, **sizes}
    model = GPT2LMHeadModel(config).eval()
    return Workload("gpt2", sizes, model, loss, batch_loss, (tokens,), held_out=(others,))


def images(model, batch_size, size, classes):
    """Classification of random images, by a model that takes batches alone."""

    def batch_loss(model, x, y):
        return F.cross_entropy(model(x), y)

    def loss(model, x, y):
        return batch_loss(model, x[None], y[None])

    batch = torch.rand(batch_size, 3, size, size), torch.randint(classes, (batch_size,))
    return Workload("images", {"batch_size": batch_size, "size": size}, model, loss, batch_loss, batch)


def resnet(batch_size, size, depths=(3, 4, 6, 3), width=64, classes=1000):
    return images(models.resnet(depths, width, classes), batch_size, size, classes)


def vision_transformer(batch_size, size, patch=16, width=384, layers=12, heads=6, classes=1000):
    model = models.VisionTransformer(size, patch, width, layers, heads, classes)
    return images(model, batch_size, size, classes)


def wide_mlp(batch_size):
    def loss(model, x, y):
        return F.mse_loss(model(x), y)

    batch = (torch.randn(batch_size, 5120), torch.randn(batch_size, 1280))
    model = models.mlp(5120, 2560, 1280, activation=nn.ReLU)
    return Workload("wide_mlp", {"batch_size": batch_size, "widths": [5120, 2560, 1280]}, model, loss, loss, batch)


def reinforce_mlp(hidden):
    return reinforce("reinforce_mlp", models.mlp(4, hidden, hidden, 2), 200, hidden=hidden)


def reinforce_gru(hidden):
    return reinforce("reinforce_gru", models.GRUPolicy(4, hidden, 2), 50, hidden=hidden)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "tutorial TD(0), B=2": lambda: td_linear(2),
    "tutorial TD(0), B=4096": lambda: td_linear(4096),
    "tutorial TD(0), B=65536": lambda: td_linear(65536),
    "TD(0) MLP 64, B=256": lambda: td_mlp(256, hidden=64),
    "TD(0) MLP 64, B=1024": lambda: td_mlp(1024, hidden=64),
    "TD(0) MLP 256, B=256": lambda: td_mlp(256, hidden=256),
    "TD(0) MLP 256, B=1024": lambda: td_mlp(1024, hidden=256),
    "REINFORCE MLP 64, 32x200": lambda: reinforce_mlp(hidden=64),
    "REINFORCE MLP 256, 32x200": lambda: reinforce_mlp(hidden=256),
    "GRU policy, 32x50": lambda: reinforce_gru(hidden=64),
    "DQN Nature CNN, B=32": lambda: dqn_cnn(32),
    "transformer tied, B=16": lambda: transformer(2000, 16),
    "transformer tied 32000, B=16": lambda: transformer(32000, 16),
    "LoRA transformer, B=16": lambda: lora(2000, 16),
    "wide MLP 5120, B=32": lambda: wide_mlp(32),
}
LARGE: dict[str, Callable[[], Workload]] = {
    "GPT-2 124M, T=128, B=4": lambda: gpt2(4, 128),
    "GPT-2 124M, T=512, B=2": lambda: gpt2(2, 512),
}
# What a GPU is measured with, and the same in a size that a CPU computes at once.
CARD: dict[str, Callable[[], Workload]] = {
    "GPT-2 124M, T=1024, B=16": lambda: gpt2(16, 1024, held_out=8),
    "ResNet-50, 224², B=64": lambda: resnet(64, 224),
    "ViT-S/16, 224², B=64": lambda: vision_transformer(64, 224),
}
TINY: dict[str, Callable[[], Workload]] = {
    "tiny GPT-2": lambda: gpt2(3, 8, held_out=2, n_embd=16, n_layer=1, n_head=2, vocab_size=50),
    "tiny ResNet": lambda: resnet(3, 32, (1, 1), 4, 10),
    "tiny ViT": lambda: vision_transformer(3, 16, 8, 16, 1, 2, 10),
}


# For the scaling curves, this one exists in any size.
_TD_MLP = re.compile(r"TD\(0\) MLP (\d+), B=(\d+)")


def build(name: str) -> Workload:
    """Build a workload of the suite or of the sweep; the same name gives the same numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if sizes := _TD_MLP.fullmatch(name):
            work = td_mlp(hidden=int(sizes[1]), batch_size=int(sizes[2]))
        elif name in DRAWS:
            work = drawn.build(DRAWS[name])
        else:
            work = (WORKLOADS | LARGE | CARD | TINY)[name]()
        return _replace(work, name=name)
