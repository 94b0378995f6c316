"""Activation functions: ``F.prelu``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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
    torch.prelu: _prelu,
    Tensor.prelu: _prelu,
}
