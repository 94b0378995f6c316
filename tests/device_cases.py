"""Small models and every reduction of them, for tests on other devices than the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import persample as ps
from persample.factors import Factor

B = 5


class Case(NamedTuple):
    """A loss with its parameters and batch."""

    loss: Callable[..., Any]
    params: Any
    batch: Any


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 7)

    def forward(self, tokens):
        return self.head(self.layer(self.table(tokens)[None])[0])


def squares(model, x):
    y = model(x)
    return (y[0] if isinstance(y, tuple) else y).square().sum(), {"mean": x.mean()}


def surprise(model, tokens):
    return F.cross_entropy(model(tokens), tokens), {"length": tokens.sum()}


def logistic(params, x):
    return (params["w"] @ x).sigmoid().sum() * params["b"], {"x": x}


def cases() -> dict[str, Case]:
    torch.manual_seed(0)
    image = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(0), nn.Linear(12, 2))
    return {
        "linear layers": Case(squares, nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(B, 3)),
        "convolutions": Case(squares, image, torch.randn(B, 2, 5, 5)),
        "attention": Case(surprise, LanguageModel(), torch.randint(0, 7, (B, 5))),
        "recurrent": Case(squares, nn.GRU(3, 2), torch.randn(B, 4, 3)),
        "tensors": Case(logistic, {"w": torch.randn(2, 3), "b": torch.tensor(0.5)}, torch.randn(B, 3)),
    }


def moved(tree: Any, device: Any) -> Any:
    """A copy on a device."""
    if isinstance(tree, nn.Module):
        return copy.deepcopy(tree).to(device)
    kinds = (torch.Tensor, Factor)
    return pytree.tree_map(
        lambda x: x.to(device) if isinstance(x, kinds) else x, tree, is_leaf=lambda x: isinstance(x, Factor)
    )


def squash(norm: Any) -> Any:
    return 1 / (1 + norm)


def length(aux: Any) -> Any:
    return sum(x.sum() for x in aux.values())


# Reductions, of gradients like the parameters and of factors, both on the device of the call.
REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "Stack()": lambda *_: ps.Stack(),
    "Sum()": lambda *_: ps.Sum(),
    "Mean()": lambda *_: ps.Mean(),
    "Norm()": lambda *_: ps.Norm(),
    "Norm(per_param=True)": lambda *_: ps.Norm(per_param=True),
    "ClippedSum(C)": lambda *_: ps.ClippedSum(0.5),
    "ClippedMean(C)": lambda *_: ps.ClippedMean(0.5),
    "ClippedMean(C, per_param=True)": lambda *_: ps.ClippedMean(0.5, per_param=True),
    "WeightedSum(f)": lambda *_: ps.WeightedSum(squash),
    "Gram()": lambda *_: ps.Gram(),
    "Gram(other)": lambda _, other: ps.Gram(other),
    "CosineSimilarity()": lambda *_: ps.CosineSimilarity(),
    "Dot(direction)": lambda direction, _: ps.Dot(direction),
    "SecondMoment()": lambda *_: ps.SecondMoment(),
    "Variance()": lambda *_: ps.Variance(),
    "NoiseScale()": lambda *_: ps.NoiseScale(),
    "Project(dim, seed)": lambda *_: ps.Project(3, seed=0),
    "Sketch(rank, seed)": lambda *_: ps.Sketch(2, seed=0),
    "Loss()": lambda *_: ps.Loss(),
    "Aux()": lambda *_: ps.Aux(),
    "Factored()": lambda *_: ps.Factored(),
    "NaturalGradient(λ)": lambda *_: ps.NaturalGradient(0.1),
    "NaturalGradient(λ, targets=function of aux)": lambda *_: ps.NaturalGradient(0.1, targets=length),
    "NaturalGradient(λ, previous=tree)": lambda direction, _: ps.NaturalGradient(0.1, previous=direction),
    "Leverage(λ)": lambda *_: ps.Leverage(0.1),
}


def written_out(tree: Any) -> list[Any]:
    leaves = pytree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, Factor))
    return [x.materialize() if isinstance(x, Factor) else x for x in leaves]
