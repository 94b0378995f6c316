"""Operations that torch.func batches well but for scalars, or but for one vmap inside of another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample.utils.dtypes import is_autocast


def _reduced(
    function: Callable[..., Tensor],
    each: Callable[..., Tensor],
    input: Tensor,  # noqa: A002
    target: Tensor,
    reduction: str = "mean",
    **options: Any,
) -> Tensor:
    # Below two vmaps torch.func takes both for one, which mostly shows as sizes that do not fit; and its gradient of
    # smooth_l1_loss takes NaN for 0 (pytorch/pytorch#99429).
    given = {name: option for name, option in options.items() if option is not None}
    plain = given.keys() <= {"delta", "beta"} and all(x > 0 for x in given.values())
    floats = input.is_floating_point() and target.is_floating_point() and not is_autocast(input.device)
    if not plain or not floats or input.shape != target.shape or reduction not in _REDUCTIONS:
        return function(input, target, reduction=reduction, **options)  # warns, raises, or takes weights
    return _REDUCTIONS[reduction](each(input - target, **given))


def _huber(difference: Tensor, delta: float = 1.0) -> Tensor:
    inner = difference.clamp(-delta, delta)
    return inner * (difference - inner / 2)


def _smooth_l1(difference: Tensor, beta: float = 1.0) -> Tensor:
    return _huber(difference, beta) / beta


def _prelu(input: Tensor, weight: Tensor) -> Tensor:  # noqa: A002
    channels = input.shape[1] if input.ndim > 1 else 1
    if weight.ndim > 1 or weight.numel() not in {1, channels} or weight.dtype != input.dtype:
        return torch.prelu(input, weight)  # raises
    shape = [1] * input.ndim
    if weight.numel() > 1:
        shape[1] = channels
    positive = input > 0
    rest = torch.where(positive, 0, input)  # an infinite input times no gradient would be NaN
    return torch.where(positive, input, weight.reshape(shape) * rest)


def _roll(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
    if input.ndim:
        return torch.roll(input, *args, **kwargs)
    torch.roll(torch.zeros(()), *args, **kwargs)  # may raise
    return input.clone()  # of scalars torch.func rolls the samples


def _select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:  # noqa: A002
    if not isinstance(index, int) or src.shape != input.select(dim, index).shape:
        return torch.select_scatter(input, src, dim, index)  # raises
    size = input.shape[dim]
    chosen = torch.arange(size, device=input.device) == index % size
    shape = [1] * input.ndim
    shape[dim] = size
    return torch.where(chosen.view(shape), src.unsqueeze(dim % input.ndim).to(input.dtype), input)


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"mean": torch.mean, "sum": torch.sum, "none": lambda x: x}
NESTED: dict[Any, Callable[..., Any]] = {
    F.mse_loss: functools.partial(_reduced, F.mse_loss, torch.square),
    F.huber_loss: functools.partial(_reduced, F.huber_loss, _huber),
    F.smooth_l1_loss: functools.partial(_reduced, F.smooth_l1_loss, _smooth_l1),
    torch.prelu: _prelu,
    Tensor.prelu: _prelu,
    torch.roll: _roll,
    Tensor.roll: _roll,
    torch.select_scatter: _select_scatter,
    Tensor.select_scatter: _select_scatter,
}
