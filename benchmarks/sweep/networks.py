"""The networks of the sweep, in plain torch: inputs of one sample or of a batch → logits of CLASSES."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.sweep.draws import Draw

CLASSES, CHANNELS, VOCABULARY, HEADS, RANK, SCALE = 10, 3, 256, 4, 8, 2.0


def network(draw: Draw) -> nn.Module:
    """Return the network of a draw."""
    return _NETWORKS[draw.kind](draw)


def convolutions(width: int, layers: int) -> nn.Sequential:
    """Convolutions of 3 × 3 that keep the size of the image, its mean, and a linear layer."""
    channels = [CHANNELS, *[width] * layers]
    parts = [part for pair in itertools.pairwise(channels) for part in (nn.Conv2d(*pair, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(-3), nn.Linear(width, CLASSES))


class Recurrent(nn.Module):
    """Logits after every step: parameters memory.weight_ih_l0, …, head.weight, head.bias."""

    def __init__(self, cell: type[nn.GRU] | type[nn.LSTM], width: int, layers: int) -> None:
        super().__init__()
        self.memory = cell(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(x)[0])


class GraphNetwork(nn.Module):
    """Logits of every node: each layer adds a node's own features and the mean of its neighbours'."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.near = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        for own, near in zip(self.own, self.near, strict=True):
            x = torch.relu(own(x) + adjacency @ near(x))
        return self.head(x)


class Residual(nn.Module):
    """Bare parameters, which :func:`residual` takes as a dict."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        for i in range(layers):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.randn(width, width) / width**0.5))
            self.register_parameter(f"gain{i}", nn.Parameter(torch.ones(width)))
        self.head = nn.Parameter(torch.randn(width, CLASSES) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return residual(dict(self.named_parameters()), x)


def residual(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Layers x + gain · tanh(x wᵀ) and a last product, written without modules."""
    for i in range(len(params) // 2):
        x = x + torch.tanh(x @ params[f"weight{i}"].T) * params[f"gain{i}"]
    return x @ params["head"]


def _transformer(draw: Draw) -> models.Transformer:
    return models.Transformer(VOCABULARY, draw.steps, draw.width, draw.layers, HEADS)


_NETWORKS: dict[str, Callable[[Draw], nn.Module]] = {
    "MLP": lambda draw: models.mlp(*[draw.width] * (draw.layers + 1), CLASSES),
    "CNN": lambda draw: convolutions(draw.width, draw.layers),
    "GRU": lambda draw: Recurrent(nn.GRU, draw.width, draw.layers),
    "LSTM": lambda draw: Recurrent(nn.LSTM, draw.width, draw.layers),
    "transformer": _transformer,
    "LoRA": lambda draw: models.with_lora(_transformer(draw), RANK, SCALE),
    "graph network": lambda draw: GraphNetwork(draw.width, draw.layers),
    "functional": lambda draw: Residual(draw.width, draw.layers),
}
