"""What libraries that hook modules need: every parameter inside a layer of its own, and the losses of all samples.

Such a library sees what goes into a layer and what comes back to its output, once per call with grad enabled. A target
is therefore computed without grad, as their users have to write it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import LinearValue, Transformer
from benchmarks.sweep.draws import KINDS
from benchmarks.workloads import DISCOUNT, Workload


def losses(work: Workload) -> Callable[..., Tensor]:
    """Return the losses of all samples at once, batched by hand: (model, *batch) → ``[B]``."""
    if work.kind == "dqn_cnn":
        return _dqn(copy.deepcopy(work.target))
    return _LOSSES[work.kind]


def layered(model: nn.Module) -> tuple[nn.Module, Callable[[str], str]]:
    """Copy a model into one whose parameters all belong to layers, as one would write it for these libraries.

    Returns:
        The model, and from a parameter's name in it to the name in the original (their shapes may differ by an axis
        of 1).
    """
    model = copy.deepcopy(model)
    if isinstance(model, LinearValue):
        return _linear_value(model), lambda name: name.replace("weight", "theta")
    if isinstance(model, Transformer):
        return _LayeredTransformer(model), lambda name: "position" if name == "position.weight" else name
    return model, lambda name: name


def _linear_value(model: LinearValue) -> nn.Linear:
    layer = nn.Linear(len(model.theta), 1, bias=False)
    layer.weight = nn.Parameter(model.theta.detach()[None])
    return layer


class _LayeredTransformer(nn.Module):
    """The positions as an embedding, and the last layer as a linear layer with the embedding's weight."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.embed, self.blocks, self.norm = model.embed, model.blocks, model.norm
        trained = model.position.requires_grad
        self.position = nn.Embedding.from_pretrained(model.position.detach(), freeze=not trained)
        self.head = nn.Linear(*reversed(model.embed.weight.shape), bias=False, device="meta")
        self.head.weight = model.embed.weight

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.position(places))))


def _td(model, s_tm1, r_t, s_t, discount=DISCOUNT):
    with torch.no_grad():
        target = r_t + discount * model(s_t).squeeze(-1)
    return (target - model(s_tm1).squeeze(-1)).square()


def _tutorial(model, s_tm1, r_t, s_t):
    return _td(model, s_tm1, r_t, s_t, discount=1.0)


def _reinforce(model, obs_t, a_t, return_t, mask_t):
    log_pi = torch.log_softmax(model(obs_t), -1).gather(-1, a_t[..., None]).squeeze(-1)
    return -(log_pi * return_t * mask_t).sum(1)


def _dqn(target_network):
    def loss(model, s_tm1, a_tm1, r_t, s_t):
        with torch.no_grad():
            y = r_t + DISCOUNT * target_network(s_t).max(1).values
        return F.smooth_l1_loss(model(s_tm1).gather(1, a_tm1[:, None])[:, 0], y, reduction="none")

    return loss


def _next_token(model, tokens):
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1)


def _squared_error(model, x, y):
    return (model(x) - y).square().mean(1)


def _classes(model, *batch):
    *inputs, y = batch
    losses = F.cross_entropy(model(*inputs).flatten(0, -2), y.flatten(), reduction="none")
    return losses.view(len(y), -1).mean(1)


_LOSSES: dict[str, Callable[..., Tensor]] = {
    "td_linear": _tutorial,
    "td_mlp": _td,
    "reinforce_mlp": _reinforce,
    "reinforce_gru": _reinforce,
    "transformer": _next_token,
    "lora": _next_token,
    "wide_mlp": _squared_error,
    "images": _classes,
    **dict.fromkeys((f"drawn {kind}" for kind in KINDS), _classes),
}
