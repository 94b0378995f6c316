"""Temporal-difference errors of action values over a sequence: λ-returns, on and off policy."""

from __future__ import annotations

import torch
from torch import Tensor

from persample.losses.check import check_actions, check_axes, check_rows, check_same, check_steps, overridable
from persample.losses.recursion import compose, entries, shift
from persample.losses.returns import lambda_returns
from persample.losses.steps import real_steps, taken, unpadded
from persample.losses.td import error_of


@overridable
def sarsa_lambda(
    q_tm1: Tensor,
    a_tm1: Tensor,
    r_t: Tensor,
    discount_t: Tensor | float,
    q_t: Tensor,
    a_t: Tensor,
    lambda_: Tensor | float,
    stop_target_gradients: bool = True,
    *,
    mask_t: Tensor | None = None,
) -> Tensor:
    """Compute the SARSA(λ) errors Gₜ^λ − q(sₜ₋₁, aₜ₋₁) of a sequence, with λ-returns over q(sₜ, aₜ).

    Name, argument order and sign follow RLax. Source: Sutton, Barto, "Reinforcement Learning" (2018), section 12.7.

    Args:
        q_tm1: action values at times 0 … T−1, ``[T, A]``.
        a_tm1: actions taken at times 0 … T−1, integers, ``[T]``.
        r_t: rewards at times 1 … T, ``[T]``.
        discount_t: discounts at times 1 … T, ``[T]`` or a number.
        q_t: action values at times 1 … T, ``[T, A]``.
        a_t: actions taken at times 1 … T, integers, ``[T]``.
        lambda_: λ at times 1 … T, ``[T]`` or a number.
        stop_target_gradients: no gradient flows through the returns.
        mask_t: True (or non-zero) at real steps, ``[T]``; None if all are. The result is 0 at padding.

    Returns:
        The errors, ``[T]``, unreduced.

    Raises:
        ArgumentError: if shapes do not fit, or actions are not integers.

    Examples:
        >>> q, a = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 1])
        >>> sarsa_lambda(q, a, torch.ones(2), 0.5, q, a, 0.5)
        tensor([ 1., -1.])
    """
    mask = _check(q_tm1, a_tm1, r_t, discount_t, q_t, mask_t)
    check_actions("q_t", q_t, a_t=a_t)
    target_tm1 = lambda_returns(r_t, discount_t, _taken(mask, q_t, a_t), lambda_, mask_t=mask)
    return error_of(target_tm1, _taken(mask, q_tm1, a_tm1), stop_target_gradients)


@overridable
def q_lambda(
    q_tm1: Tensor,
    a_tm1: Tensor,
    r_t: Tensor,
    discount_t: Tensor | float,
    q_t: Tensor,
    lambda_: Tensor | float,
    stop_target_gradients: bool = True,
    *,
    mask_t: Tensor | None = None,
) -> Tensor:
    """Compute the Q(λ) errors Gₜ^λ − q(sₜ₋₁, aₜ₋₁) of a sequence, with λ-returns over maxₐ q(sₜ, a).

    A constant λ gives Peng's Q(λ); λ = 0 after actions that were not greedy gives Watkins's Q(λ). Name, argument order
    and sign follow RLax. Source: Sutton, Barto, "Reinforcement Learning" (2018), section 12.10; Peng, Williams,
    "Incremental Multi-Step Q-Learning" (1996).

    Args:
        q_tm1: action values at times 0 … T−1, ``[T, A]``.
        a_tm1: actions taken at times 0 … T−1, integers, ``[T]``.
        r_t: rewards at times 1 … T, ``[T]``.
        discount_t: discounts at times 1 … T, ``[T]`` or a number.
        q_t: action values at times 1 … T, ``[T, A]``. Tied maxima share the gradient.
        lambda_: λ at times 1 … T, ``[T]`` or a number.
        stop_target_gradients: no gradient flows through the returns.
        mask_t: True (or non-zero) at real steps, ``[T]``; None if all are. The result is 0 at padding.

    Returns:
        The errors, ``[T]``, unreduced.

    Raises:
        ArgumentError: if shapes do not fit, or actions are not integers.

    Examples:
        >>> q, a = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 1])
        >>> q_lambda(q, a, torch.ones(2), 0.5, q, 0.5)
        tensor([ 1.2500, -1.0000])
    """
    mask = _check(q_tm1, a_tm1, r_t, discount_t, q_t, mask_t)
    target_tm1 = lambda_returns(r_t, discount_t, unpadded(mask, q_t).amax(-1), lambda_, mask_t=mask)
    return error_of(target_tm1, _taken(mask, q_tm1, a_tm1), stop_target_gradients)


@overridable
def retrace(
    q_tm1: Tensor,
    q_t: Tensor,
    a_tm1: Tensor,
    a_t: Tensor,
    r_t: Tensor,
    discount_t: Tensor | float,
    pi_t: Tensor,
    mu_t: Tensor,
    lambda_: Tensor | float,
    eps: float = 1e-8,
    stop_target_gradients: bool = True,
    *,
    mask_t: Tensor | None = None,
) -> Tensor:
    """Compute the Retrace(λ) errors Gₜ − q(sₜ₋₁, aₜ₋₁) of a sequence that another policy μ produced.

    Gₜ = rₜ₊₁ + γₜ₊₁ [Σₐ π(a|sₜ₊₁) q(sₜ₊₁, a) + cₜ₊₁ (Gₜ₊₁ − q(sₜ₊₁, aₜ₊₁))], cₜ = λ min(1, π(aₜ|sₜ)/(μ(aₜ|sₜ) + ε)),
    and c_T = 0. Name, argument order and sign follow RLax. Source: Munos et al., "Safe and Efficient Off-Policy
    Reinforcement Learning" (2016), equation 4.

    Args:
        q_tm1: action values at times 0 … T−1, ``[T, A]``.
        q_t: action values at times 1 … T, ``[T, A]``.
        a_tm1: actions taken at times 0 … T−1, integers, ``[T]``.
        a_t: actions taken at times 1 … T, integers, ``[T]``.
        r_t: rewards at times 1 … T, ``[T]``.
        discount_t: discounts at times 1 … T, ``[T]`` or a number.
        pi_t: probabilities of all actions under the target policy at times 1 … T, ``[T, A]``.
        mu_t: probabilities of the actions taken under the behaviour policy at times 1 … T, ``[T]``.
        lambda_: λ, ``[T]`` or a number.
        eps: ε.
        stop_target_gradients: no gradient flows through the returns.
        mask_t: True (or non-zero) at real steps, ``[T]``; None if all are. The result is 0 at padding.

    Returns:
        The errors, ``[T]``, unreduced.

    Raises:
        ArgumentError: if shapes do not fit, or actions are not integers.

    Examples:
        >>> q, a, pi = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 1]), torch.full((2, 2), 0.5)
        >>> retrace(q, q, a, a, torch.ones(2), 0.5, pi, torch.ones(2), 1.0)
        tensor([ 1.1875, -1.2500])
    """
    mask = _check(q_tm1, a_tm1, r_t, discount_t, q_t, mask_t)
    check_actions("q_t", q_t, a_t=a_t)
    check_same(q_t=q_t, pi_t=pi_t)
    check_steps("r_t", r_t, mu_t=mu_t, lambda_=lambda_)
    r, discounts, mu, mixing, pi_a_t, qa_t = entries(
        mask, r_t, discount_t, mu_t, lambda_, _taken(mask, pi_t, a_t), _taken(mask, q_t, a_t)
    )
    c = mixing * (pi_a_t / (torch.where(mask, mu, 1) + eps)).clamp(max=1)
    c = torch.where(shift(mask, 1), c, 0)  # the last step has no successor
    v_t = (unpadded(mask, pi_t).double() * unpadded(mask, q_t)).sum(-1)
    target_tm1, _ = compose(r + discounts * (v_t - c * qa_t), discounts * c, len(r_t))
    return error_of(target_tm1.to(q_tm1.dtype), _taken(mask, q_tm1, a_tm1), stop_target_gradients)


def _taken(mask: Tensor, q: Tensor, a: Tensor) -> Tensor:
    return taken(unpadded(mask, q), unpadded(mask, a))


def _check(
    q_tm1: Tensor, a_tm1: Tensor, r_t: Tensor, discount_t: Tensor | float, q_t: Tensor, mask_t: Tensor | None
) -> Tensor:
    check_axes(1, r_t=r_t)
    check_steps("r_t", r_t, discount_t=discount_t, mask_t=mask_t)
    check_same(q_tm1=q_tm1, q_t=q_t)
    check_actions("q_tm1", q_tm1, a_tm1=a_tm1)
    check_rows("q_tm1", q_tm1, r_t=r_t)
    return real_steps(mask_t, r_t)
