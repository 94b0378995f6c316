"""Activation functions: tanh and prelu."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from persample.cpu import tanh
from persample.cpu.mode import Faster
from persample.vmap_rules.batched import unwrapped


def _tanh(function: Callable[..., Tensor], input: Tensor, **kwargs: Any) -> Tensor:  # noqa: A002
    if not isinstance(input, Tensor) or not tanh.suits(unwrapped(input)):
        return function(input, **kwargs)
    with Faster():
        return function(input, **kwargs)


def _prelu(input: Tensor, weight: Tensor) -> Tensor:  # noqa: A002
    # Inside of two vmaps torch.func confuses their axes.
    channels = input.shape[1] if input.ndim > 1 else 1
    if weight.ndim > 1 or weight.numel() not in {1, channels} or weight.dtype != input.dtype:
        return torch.prelu(input, weight)  # raises
    shape = [1] * input.ndim
    if weight.numel() > 1:
        shape[1] = channels
    positive = input > 0
    rest = torch.where(positive, 0, input)  # an infinite input times a gradient of zero would be NaN
    return torch.where(positive, input, weight.reshape(shape) * rest)


RULES: dict[Any, Callable[..., Any]] = {
    torch.tanh: functools.partial(_tanh, torch.tanh),
    Tensor.tanh: functools.partial(_tanh, Tensor.tanh),
    torch.prelu: _prelu,
    Tensor.prelu: _prelu,
}
