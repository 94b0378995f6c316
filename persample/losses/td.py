"""Temporal-difference errors of state values: of one transition, or of a sequence of them (λ)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from persample.errors import ArgumentError
from persample.losses.common import (
    check_axes,
    check_same,
    check_steps,
    constant,
    expand_to_steps,
    overridable,
    padding,
    unpadded,
)
from persample.losses.returns import lambda_returns


@overridable
def td_learning(
    v_tm1: Tensor, r_t: Tensor, discount_t: Tensor | float, v_t: Tensor, stop_target_gradients: bool = True
) -> Tensor:
    """Compute the TD(0) error δ = rₜ + γₜ v(sₜ) − v(sₜ₋₁).

    Name, argument order and sign follow RLax. Source: Sutton, Barto, "Reinforcement Learning" (2018), equation 6.5.

    Args:
        v_tm1: value of the state at time t−1, ``[]`` (any shape: elementwise).
        r_t: reward on the way to time t, ``[]``.
        discount_t: γ, or 0 where the episode terminated at time t, ``[]``.
        v_t: value of the state at time t, ``[]``.
        stop_target_gradients: no gradient flows through the target rₜ + γₜ v(sₜ) (the semi-gradient).

    Returns:
        The TD error, ``[]``, unreduced.

    Raises:
        ArgumentError: if shapes differ.

    Examples:
        >>> td_learning(torch.tensor(1.0), torch.tensor(2.0), 0.5, torch.tensor(4.0))
        tensor(3.)
    """
    check_same(v_tm1=v_tm1, r_t=r_t, discount_t=discount_t, v_t=v_t)
    return error_of(r_t + discount_t * v_t, v_tm1, stop_target_gradients)


@overridable
def td_loss(
    v_tm1: Tensor, r_t: Tensor, discount_t: Tensor | float, v_t: Tensor, stop_target_gradients: bool = True
) -> Tensor:
    """Compute the squared TD(0) error δ², as in MindSpore's tutorial on per-sample gradients.

    The gradient is −2δ ∇v(sₜ₋₁), the semi-gradient of TD(0), with ``stop_target_gradients``; without, it is the
    residual gradient 2δ (γ ∇v(sₜ) − ∇v(sₜ₋₁)) of Baird, "Residual Algorithms" (1995).

    Args:
        v_tm1: value of the state at time t−1, ``[]`` (any shape: elementwise).
        r_t: reward on the way to time t, ``[]``.
        discount_t: γ, or 0 where the episode terminated at time t, ``[]``.
        v_t: value of the state at time t, ``[]``.
        stop_target_gradients: no gradient flows through the target rₜ + γₜ v(sₜ).

    Returns:
        The squared error, ``[]``, unreduced.

    Raises:
        ArgumentError: if shapes differ.

    Examples:
        >>> td_loss(torch.tensor(1.0), torch.tensor(2.0), 0.5, torch.tensor(4.0))
        tensor(9.)
    """
    return td_learning(v_tm1, r_t, discount_t, v_t, stop_target_gradients) ** 2


@overridable
def td_lambda(
    v_tm1: Tensor,
    r_t: Tensor,
    discount_t: Tensor | float,
    v_t: Tensor,
    lambda_: Tensor | float,
    stop_target_gradients: bool = True,
    *,
    mask_t: Tensor | None = None,
) -> Tensor:
    """Compute the TD(λ) errors Gₜ^λ − v(sₜ₋₁) of a sequence, where G^λ are its λ-returns.

    Name, argument order and sign follow RLax. Source: Sutton, Barto, "Reinforcement Learning" (2018), equation 12.4.

    Args:
        v_tm1: values of the states at times 0 … T−1, ``[T]``.
        r_t: rewards at times 1 … T, ``[T]``.
        discount_t: discounts at times 1 … T, ``[T]`` or a number.
        v_t: values of the states at times 1 … T, ``[T]``.
        lambda_: λ at times 1 … T, ``[T]`` or a number.
        stop_target_gradients: no gradient flows through the returns.
        mask_t: True (or non-zero) at real steps, ``[T]``; None if all are. The result is 0 at padding.

    Returns:
        The errors, ``[T]``, unreduced.

    Raises:
        ArgumentError: if shapes do not fit.

    Examples:
        >>> td_lambda(torch.ones(2), torch.ones(2), 0.5, torch.tensor([4.0, 8.0]), 0.5)
        tensor([2.2500, 4.0000])
    """
    check_axes(1, r_t=r_t)
    check_steps("r_t", r_t, v_tm1=v_tm1)
    target_tm1 = lambda_returns(r_t, discount_t, v_t, lambda_, mask_t=mask_t)
    prediction_tm1 = unpadded(padding(mask_t, r_t), expand_to_steps(v_tm1, r_t))
    return error_of(target_tm1, prediction_tm1, stop_target_gradients)


@overridable
def huber_loss(x: Tensor, delta: float = 1.0) -> Tensor:
    """Compute ½x² where |x| ≤ δ and δ(|x| − ½δ) elsewhere: the gradient is x clipped to [−δ, δ].

    Name and argument order follow RLax. Source: Huber, "Robust Estimation of a Location Parameter" (1964).

    Args:
        x: errors, any shape.
        delta: the bound δ, a positive number.

    Returns:
        The losses, in the shape of ``x``.

    Raises:
        ArgumentError: if ``delta`` is not positive.

    Examples:
        >>> huber_loss(torch.tensor([0.5, -3.0]))
        tensor([0.1250, 2.5000])
    """
    if not delta > 0:
        fix = "Use x.abs() for the limit δ → 0."
        raise ArgumentError.about("delta", expected="a number > 0", received=repr(delta), fix=fix)
    return F.huber_loss(x, torch.zeros_like(x), reduction="none", delta=delta)


def error_of(target_tm1: Tensor, prediction_tm1: Tensor, stop_target_gradients: bool) -> Tensor:
    """Return target minus prediction; no gradient flows through the target if asked so."""
    return constant(target_tm1, stop_target_gradients=stop_target_gradients) - prediction_tm1
