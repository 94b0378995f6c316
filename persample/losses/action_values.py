"""Temporal-difference errors of action values, for one transition."""

from __future__ import annotations

from torch import Tensor

from persample.losses.common import check_actions, check_rows, check_same, of_actions, overridable
from persample.losses.td import error_of


@overridable
def sarsa(
    q_tm1: Tensor,
    a_tm1: Tensor,
    r_t: Tensor,
    discount_t: Tensor | float,
    q_t: Tensor,
    a_t: Tensor,
    stop_target_gradients: bool = True,
) -> Tensor:
    """Compute the SARSA error rₜ + γₜ q(sₜ, aₜ) − q(sₜ₋₁, aₜ₋₁).

    Name, argument order and sign follow RLax. Source: Sutton, Barto, "Reinforcement Learning" (2018), equation 6.7.

    Args:
        q_tm1: action values at time t−1, ``[A]`` (further axes in front: elementwise).
        a_tm1: action taken at time t−1, an integer, ``[]``.
        r_t: reward on the way to time t, ``[]``.
        discount_t: γ, or 0 where the episode terminated at time t, ``[]``.
        q_t: action values at time t, ``[A]``.
        a_t: action taken at time t, an integer, ``[]``.
        stop_target_gradients: no gradient flows through the target.

    Returns:
        The error, ``[]``, unreduced.

    Raises:
        ArgumentError: if shapes do not fit, or actions are not integers.

    Examples:
        >>> import torch
        >>> q, a = torch.tensor([1.0, 2.0]), torch.tensor(1)
        >>> sarsa(q, a, torch.tensor(3.0), 0.5, q, a)
        tensor(2.)
    """
    check_same(q_tm1=q_tm1, q_t=q_t)
    check_actions("q_t", q_t, a_t=a_t)
    return _error(q_tm1, a_tm1, r_t, discount_t, of_actions(q_t, a_t), stop_target_gradients)


@overridable
def expected_sarsa(
    q_tm1: Tensor,
    a_tm1: Tensor,
    r_t: Tensor,
    discount_t: Tensor | float,
    q_t: Tensor,
    probs_a_t: Tensor,
    stop_target_gradients: bool = True,
) -> Tensor:
    """Compute the expected SARSA error rₜ + γₜ Σₐ π(a|sₜ) q(sₜ, a) − q(sₜ₋₁, aₜ₋₁).

    Name, argument order and sign follow RLax. Source: Sutton, Barto, "Reinforcement Learning" (2018), equation 6.9.

    Args:
        q_tm1: action values at time t−1, ``[A]`` (further axes in front: elementwise).
        a_tm1: action taken at time t−1, an integer, ``[]``.
        r_t: reward on the way to time t, ``[]``.
        discount_t: γ, or 0 where the episode terminated at time t, ``[]``.
        q_t: action values at time t, ``[A]``.
        probs_a_t: probabilities of the actions at time t, ``[A]``.
        stop_target_gradients: no gradient flows through the target.

    Returns:
        The error, ``[]``, unreduced.

    Raises:
        ArgumentError: if shapes do not fit, or actions are not integers.

    Examples:
        >>> import torch
        >>> q, a, probs = torch.tensor([1.0, 2.0]), torch.tensor(1), torch.tensor([0.5, 0.5])
        >>> expected_sarsa(q, a, torch.tensor(3.0), 0.5, q, probs)
        tensor(1.7500)
    """
    check_same(q_tm1=q_tm1, q_t=q_t, probs_a_t=probs_a_t)
    return _error(q_tm1, a_tm1, r_t, discount_t, (probs_a_t * q_t).sum(-1), stop_target_gradients)


@overridable
def q_learning(
    q_tm1: Tensor,
    a_tm1: Tensor,
    r_t: Tensor,
    discount_t: Tensor | float,
    q_t: Tensor,
    stop_target_gradients: bool = True,
) -> Tensor:
    """Compute the Q-learning error rₜ + γₜ maxₐ q(sₜ, a) − q(sₜ₋₁, aₜ₋₁).

    Name, argument order and sign follow RLax. Source: Sutton, Barto, "Reinforcement Learning" (2018), equation 6.8.

    Args:
        q_tm1: action values at time t−1, ``[A]`` (further axes in front: elementwise).
        a_tm1: action taken at time t−1, an integer, ``[]``.
        r_t: reward on the way to time t, ``[]``.
        discount_t: γ, or 0 where the episode terminated at time t, ``[]``.
        q_t: action values at time t, ``[A]``. Where several are the largest, they share the gradient.
        stop_target_gradients: no gradient flows through the target.

    Returns:
        The error, ``[]``, unreduced.

    Raises:
        ArgumentError: if shapes do not fit, or actions are not integers.

    Examples:
        >>> import torch
        >>> q, a = torch.tensor([1.0, 2.0]), torch.tensor(0)
        >>> q_learning(q, a, torch.tensor(3.0), 0.5, q)
        tensor(3.)
    """
    check_same(q_tm1=q_tm1, q_t=q_t)
    return _error(q_tm1, a_tm1, r_t, discount_t, q_t.amax(-1), stop_target_gradients)


@overridable
def double_q_learning(
    q_tm1: Tensor,
    a_tm1: Tensor,
    r_t: Tensor,
    discount_t: Tensor | float,
    q_t_value: Tensor,
    q_t_selector: Tensor,
    stop_target_gradients: bool = True,
) -> Tensor:
    """Compute the double Q-learning error rₜ + γₜ q(sₜ, argmaxₐ q′(sₜ, a)) − q(sₜ₋₁, aₜ₋₁).

    Name, argument order and sign follow RLax. Source: van Hasselt, "Double Q-learning" (2010); with a target network
    van Hasselt, Guez, Silver, "Deep Reinforcement Learning with Double Q-learning" (2016), equation 4.

    Args:
        q_tm1: action values at time t−1, ``[A]`` (further axes in front: elementwise).
        a_tm1: action taken at time t−1, an integer, ``[]``.
        r_t: reward on the way to time t, ``[]``.
        discount_t: γ, or 0 where the episode terminated at time t, ``[]``.
        q_t_value: the action values q at time t that evaluate the selected action, ``[A]``.
        q_t_selector: the action values q′ that select it (the first of tied maxima), ``[A]``; without gradient.
        stop_target_gradients: no gradient flows through the target.

    Returns:
        The error, ``[]``, unreduced.

    Raises:
        ArgumentError: if shapes do not fit, or actions are not integers.

    Examples:
        >>> import torch
        >>> q, a = torch.tensor([1.0, 2.0]), torch.tensor(0)
        >>> double_q_learning(q, a, torch.tensor(3.0), 0.5, q, -q)
        tensor(2.5000)
    """
    check_same(q_tm1=q_tm1, q_t_value=q_t_value, q_t_selector=q_t_selector)
    return sarsa(q_tm1, a_tm1, r_t, discount_t, q_t_value, q_t_selector.argmax(-1), stop_target_gradients)


def _error(
    q_tm1: Tensor, a_tm1: Tensor, r_t: Tensor, discount_t: Tensor | float, v_t: Tensor, stop_target_gradients: bool
) -> Tensor:
    check_actions("q_tm1", q_tm1, a_tm1=a_tm1)
    check_rows("q_tm1", q_tm1, r_t=r_t, discount_t=discount_t)
    return error_of(r_t + discount_t * v_t, of_actions(q_tm1, a_tm1), stop_target_gradients)
