"""The models of the workloads, in plain torch."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional as F


class LinearValue(nn.Module):
    """The tutorial's value function: v(s) = s·θ, ``theta [features]``."""

    def __init__(self, features):
        super().__init__()
        self.theta = nn.Parameter(torch.randn(features))

    def forward(self, s):
        return s @ self.theta


def mlp(*sizes, activation=nn.Tanh):
    """Linear layers with an activation between them: parameters 0.weight, 0.bias, 2.weight, …"""
    pairs = itertools.pairwise(sizes)
    layers = [layer for i, o in pairs for layer in (nn.Linear(i, o), activation())]
    return nn.Sequential(*layers[:-1])


def nature_cnn(actions):
    """The Q-network of Mnih et al., "Human-level control through deep reinforcement learning" (2015)."""
    convolutions = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3)]
    return nn.Sequential(
        *convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, actions)
    )


class GRUPolicy(nn.Module):
    """Logits after every step of a GRU: parameters memory.weight_ih_l0, …, head.weight, head.bias."""

    def __init__(self, features, hidden, actions):
        super().__init__()
        self.memory = nn.GRU(features, hidden, batch_first=True)
        self.head = nn.Linear(hidden, actions)

    def forward(self, obs_t):
        return self.head(self.memory(obs_t)[0])


class LoRALinear(nn.Module):
    """A frozen layer with a trained update of low rank, base(x) + scale · up(down(x)): Hu et al., "LoRA" (2021)."""

    def __init__(self, base, rank, scale):
        super().__init__()
        self.base, self.scale = base.requires_grad_(requires_grad=False), scale
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.scale * self.up(self.down(x))


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width, heads, *, causal=True):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = mlp(width, 4 * width, width, activation=nn.GELU)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(-3, -2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A causal language model whose embedding is also its last layer: tokens ``[…, T]`` → logits ``[…, T, V]``."""

    def __init__(self, vocabulary, length, width, layers, heads):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) / 50)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens):
        return F.linear(self.norm(self.blocks(self.embed(tokens) + self.position)), self.embed.weight)  # tied


def with_lora(model, rank, scale):
    """Freeze a transformer and add adapters to the qkv and out layers of its blocks."""
    model.requires_grad_(requires_grad=False)
    for block in model.blocks:
        block.qkv, block.out = LoRALinear(block.qkv, rank, scale), LoRALinear(block.out, rank, scale)
    return model


class VisionTransformer(nn.Module):
    """Logits of images ``[n, 3, size, size]`` from the mean of their patches: Dosovitskiy et al. (2021)."""

    def __init__(self, size, patch, width, layers, heads, classes):
        super().__init__()
        self.patches, self.patch = nn.Linear(3 * patch**2, width), patch
        self.position = nn.Embedding((size // patch) ** 2, width)  # a layer: libraries with hooks see no bare parameter
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images):
        x = self.patches(F.unfold(images, self.patch, stride=self.patch).mT)
        x = x + self.position(torch.arange(x.shape[1], device=x.device).repeat(len(x), 1))
        return self.head(self.norm(self.blocks(x)).mean(1))


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut: He et al., "Deep residual learning" (2016)."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        first, last = _normed(inputs, width, 1), _normed(width, outputs, 1)
        self.body = nn.Sequential(first, nn.ReLU(), _normed(width, width, 3, stride), nn.ReLU(), last)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _normed(inputs, outputs, 1, stride)

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(depths, width, classes):
    """A residual network, (3, 4, 6, 3) and 64 for ResNet-50, with group norm: batch norm would couple the samples."""
    blocks, inputs = [], width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            blocks.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
            inputs = 4 * width << stage
    stem = _normed(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def _normed(inputs, outputs, size, stride=1):
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.GroupNorm(min(32, outputs), outputs))
