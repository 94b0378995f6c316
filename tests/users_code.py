"""Code of users, which mypy checks with the package: no error but those that are marked, each where it is marked."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor, nn

import persample as ps
from persample import losses


class Transition(NamedTuple):
    s_tm1: Tensor
    r_t: Tensor
    s_t: Tensor


class Agent(NamedTuple):
    actor: nn.Linear
    critic: nn.Linear


class Wanted(NamedTuple):
    update: ps.Mean
    norms: ps.Norm


def by_dict(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (params["w"] @ x) ** 2


def by_module(model: nn.Linear, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    y: Tensor = model(x)
    return y.sum(), {"y": y}


def by_tuple(agent: Agent, t: Transition) -> Tensor:
    return losses.td_loss(agent.critic(t.s_tm1)[0], t.r_t, 0.9, agent.critic(t.s_t)[0])


def text(params: Tensor, x: Tensor) -> str:
    return "no loss"


x, linear = torch.ones(5, 3), nn.Linear(3, 1)
agent, batch = Agent(linear, linear), Transition(x, x[:, 0], x)
means = [ps.Mean(), ps.Norm()]

rows: dict[str, Tensor] = ps.per_sample_grads(by_dict, {"w": x[0]}, x)
update: dict[str, Tensor] = ps.per_sample_grads(by_module, linear, x, ps.ClippedMean(1.0), engine="compiled")
both = ps.per_sample_grads(by_tuple, agent, batch, Wanted(ps.Mean(), ps.Norm()), chunk_size=2, randomness="same")
nested = ps.per_sample_grads(by_dict, OrderedDict(w=x[0]), (x,), {"a": (ps.Mean(), None), "b": means})
shared = ps.per_sample_grads(lambda w, s, x: s * w @ x, x[0], (x[0], x), in_dims=(None, (None, 0)), weights=[1.0] * 5)
loss, grads = ps.composite_grads(lambda w, x: w @ x, lambda z: z.sum(), x[0], x, batch_norm="refuse")
print(loss.item(), ps.explain(by_module, linear, x, means).rows[0].factor)
ps.set_grads(linear, update)

ps.per_sample_grads(by_dict, {"w": x[0]})  # type: ignore[call-arg]
ps.per_sample_grads(by_dict, {"w": x[0]}, x, ps.Mean(), None)  # type: ignore[arg-type]
ps.per_sample_grads(by_dict, {"w": x[0]}, x, reduction=ps.Mean())  # type: ignore[call-arg]
ps.per_sample_grads(by_dict, {"w": x[0]}, x, ps.Mean)  # type: ignore[arg-type]
ps.per_sample_grads(by_dict, {"w": x[0]}, x, "mean")  # type: ignore[arg-type]
ps.per_sample_grads(by_dict, {"w": x[0]}, x, {"update": "mean"})  # type: ignore[dict-item]
ps.per_sample_grads(by_dict, {"w": x[0]}, x, engine="eagre")  # type: ignore[arg-type]
ps.per_sample_grads(by_dict, {"w": x[0]}, x, randomness=True)  # type: ignore[arg-type]
ps.per_sample_grads(by_dict, {"w": x[0]}, x, chunk_size=2.0)  # type: ignore[arg-type]
ps.per_sample_grads(by_dict, {"w": x[0]}, x, in_dims=(None, 0, 0))  # type: ignore[arg-type]
ps.per_sample_grads(text, x[0], x)  # type: ignore[arg-type]
ps.composite_grads(lambda w, x: w @ x, lambda z: z.sum(), x[0], x, engine="compiled")  # type: ignore[arg-type]
ps.set_grads(update, linear)  # type: ignore[arg-type]
ps.Norm(True, False)  # type: ignore[call-arg]
losses.td_loss(x[0, 0], x[0, 0], "0.9", x[0, 0])  # type: ignore[arg-type]
