"""Temporal-difference errors of value functions, for one transition."""

from __future__ import annotations

from torch import Tensor

from persample.trees import stop_gradient


def td_learning(
    v_tm1: Tensor, r_t: Tensor, discount_t: Tensor | float, v_t: Tensor, stop_target_gradients: bool = True
) -> Tensor:
    """Compute the TD(0) error δ = rₜ + γₜ v(sₜ) − v(sₜ₋₁).

    Name, argument order and sign are RLax's. Source: Sutton, Barto, "Reinforcement Learning" (2018), equation 6.5.

    Args:
        v_tm1: value of the state at time t−1, ``[]`` (any shape: elementwise).
        r_t: reward on the way to time t, ``[]``.
        discount_t: γ, or 0 where the episode terminated at time t, ``[]``.
        v_t: value of the state at time t, ``[]``.
        stop_target_gradients: no gradient flows through the target rₜ + γₜ v(sₜ) (the semi-gradient).

    Returns:
        The TD error, ``[]``, unreduced.

    Examples:
        >>> import torch
        >>> td_learning(torch.tensor(1.0), torch.tensor(2.0), 0.5, torch.tensor(4.0))
        tensor(3.)
    """
    target_tm1 = r_t + discount_t * v_t
    if stop_target_gradients:
        target_tm1 = stop_gradient(target_tm1)
    return target_tm1 - v_tm1


def td_loss(
    v_tm1: Tensor, r_t: Tensor, discount_t: Tensor | float, v_t: Tensor, stop_target_gradients: bool = True
) -> Tensor:
    """Compute the squared TD(0) error δ², as in MindSpore's tutorial on per-sample gradients.

    With ``stop_target_gradients`` its gradient is −2δ ∇v(sₜ₋₁), TD(0)'s semi-gradient; without it the residual
    gradient 2δ (γ ∇v(sₜ) − ∇v(sₜ₋₁)) of Baird, "Residual Algorithms" (1995).

    Args:
        v_tm1: value of the state at time t−1, ``[]`` (any shape: elementwise).
        r_t: reward on the way to time t, ``[]``.
        discount_t: γ, or 0 where the episode terminated at time t, ``[]``.
        v_t: value of the state at time t, ``[]``.
        stop_target_gradients: no gradient flows through the target rₜ + γₜ v(sₜ).

    Returns:
        The squared error, ``[]``, unreduced.

    Examples:
        >>> import torch
        >>> td_loss(torch.tensor(1.0), torch.tensor(2.0), 0.5, torch.tensor(4.0))
        tensor(9.)
    """
    return td_learning(v_tm1, r_t, discount_t, v_t, stop_target_gradients) ** 2
