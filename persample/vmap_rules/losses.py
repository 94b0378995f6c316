"""Losses: ``F.mse_loss``, ``F.huber_loss``, ``F.gaussian_nll_loss``, …."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample.errors import LossError
from persample.utils.dtypes import is_autocast
from persample.vmap_rules.batched import is_differentiated


def _linear_cross_entropy(*args: Any, options: Any = None, weight: Tensor | None = None, **kwargs: Any) -> Tensor:
    """Compute it at once: torch 2.13 batches the gradients of its parts wrongly, without an error."""
    if options is not None and weight is not None and is_differentiated(weight):
        raise LossError(
            "loss_fn: linear_cross_entropy with options expected weights of classes that depend on no parameter, "
            "received weights that do. Leave options out, or detach the weights."
        )
    return F.linear_cross_entropy(*args, weight=weight, **kwargs)


def _difference_loss(
    function: Callable[..., Tensor],
    of_difference: Callable[..., Tensor],
    input: Tensor,  # noqa: A002
    target: Tensor,
    reduction: str = "mean",
    **options: Any,
) -> Tensor:
    # Inside of two vmaps torch.func confuses their axes, which mostly shows as sizes that do not fit. Its gradient of
    # smooth_l1_loss is 0 where it should be NaN (pytorch/pytorch#99429).
    given = {name: option for name, option in options.items() if option is not None}
    plain = given.keys() <= {"delta", "beta"} and all(x > 0 for x in given.values())
    floats = input.is_floating_point() and target.is_floating_point() and not is_autocast(input.device)
    if not plain or not floats or input.shape != target.shape or reduction not in _REDUCTIONS:
        return function(input, target, reduction=reduction, **options)  # warns, raises, or takes weights
    return _REDUCTIONS[reduction](of_difference(input - target, **given))


def _huber(difference: Tensor, delta: float = 1.0) -> Tensor:
    is_far = difference.abs() >= delta  # selected, since a product with an infinite gradient may be NaN
    near, far = torch.where(is_far, 0, difference), torch.where(is_far, difference, delta)
    return torch.where(is_far, delta * (far.abs() - delta / 2), near.square() / 2)


def _smooth_l1(difference: Tensor, beta: float = 1.0) -> Tensor:
    return _huber(difference, beta) / beta


def gaussian_nll_loss(  # noqa: PLR0917 - as torch's
    input: Tensor,  # noqa: A002
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Compute ``F.gaussian_nll_loss`` without its check that a tensor of variances is not negative."""
    sizes = {input.shape, input.shape[:-1], (*input.shape[:-1], 1)}
    fits = var.shape in sizes if isinstance(var, Tensor) else var >= 0
    if not fits or reduction not in _REDUCTIONS:
        return F.gaussian_nll_loss(input, target, var, full, eps, reduction)  # raises
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    if input.shape != var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = torch.where(var < eps, eps + (var - var.detach()), var)  # the value is clamped, its gradient is not
    loss = (var.log() + (input - target).square() / var) / 2
    if full:
        loss = loss + math.log(2 * math.pi) / 2
    return _REDUCTIONS[reduction](loss)


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"mean": torch.mean, "sum": torch.sum, "none": lambda x: x}
RULES: dict[Any, Callable[..., Any]] = {
    F.mse_loss: functools.partial(_difference_loss, F.mse_loss, torch.square),
    F.huber_loss: functools.partial(_difference_loss, F.huber_loss, _huber),
    F.smooth_l1_loss: functools.partial(_difference_loss, F.smooth_l1_loss, _smooth_l1),
    F.gaussian_nll_loss: gaussian_nll_loss,
    F.linear_cross_entropy: _linear_cross_entropy,
}
