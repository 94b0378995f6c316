"""Temporal-difference errors over a sequence: λ-returns of action values, on and off policy; V-trace."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from persample.losses.common import (
    check_actions,
    check_axes,
    check_rows,
    check_same,
    check_steps,
    constant,
    of_actions,
    overridable,
    real_steps,
    time_axis,
    unpadded,
)
from persample.losses.returns import compose, entries, lambda_returns, result_dtype, shift
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
    target_tm1 = lambda_returns(r_t, discount_t, _of_actions(mask, q_t, a_t), lambda_, mask_t=mask)
    return error_of(target_tm1, _of_actions(mask, q_tm1, a_tm1), stop_target_gradients)


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
    return error_of(target_tm1, _of_actions(mask, q_tm1, a_tm1), stop_target_gradients)


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
        mask, r_t, discount_t, mu_t, lambda_, _of_actions(mask, pi_t, a_t), _of_actions(mask, q_t, a_t)
    )
    c = mixing * (pi_a_t / (torch.where(mask, mu, 1) + eps)).clamp(max=1)
    c = torch.where(shift(mask, 1), c, 0)  # the last step has no successor
    v_t = (unpadded(mask, pi_t).double() * unpadded(mask, q_t)).sum(-1)
    target_tm1, _ = compose(r + discounts * (v_t - c * qa_t), discounts * c, len(r_t))
    return error_of(target_tm1.to(q_tm1.dtype), _of_actions(mask, q_tm1, a_tm1), stop_target_gradients)


def _of_actions(mask: Tensor, q: Tensor, a: Tensor) -> Tensor:
    return of_actions(unpadded(mask, q), unpadded(mask, a))


def _check(
    q_tm1: Tensor, a_tm1: Tensor, r_t: Tensor, discount_t: Tensor | float, q_t: Tensor, mask_t: Tensor | None
) -> Tensor:
    check_axes(1, r_t=r_t)
    check_steps("r_t", r_t, discount_t=discount_t, mask_t=mask_t)
    check_same(q_tm1=q_tm1, q_t=q_t)
    check_actions("q_tm1", q_tm1, a_tm1=a_tm1)
    check_rows("q_tm1", q_tm1, r_t=r_t)
    return real_steps(mask_t, r_t)


class VTraceOutput(NamedTuple):
    """The result of ``vtrace_td_error_and_advantage``, with the names of RLax.

    Attributes:
        errors: V-trace targets minus values, for the loss of the critic, ``[T]``.
        pg_advantage: advantages for the policy gradient, ``[T]``.
        q_estimate: estimates of q(sₜ₋₁, aₜ₋₁), ``[T]``.
    """

    errors: Tensor
    pg_advantage: Tensor
    q_estimate: Tensor


@overridable
def vtrace_td_error_and_advantage(
    v_tm1: Tensor,
    v_t: Tensor,
    r_t: Tensor,
    discount_t: Tensor | float,
    rho_tm1: Tensor,
    lambda_: Tensor | float = 1.0,
    clip_rho_threshold: float = 1.0,
    clip_pg_rho_threshold: float = 1.0,
    stop_target_gradients: bool = True,
    *,
    mask_t: Tensor | None = None,
    time_dim: int | None = None,
) -> VTraceOutput:
    """Compute the V-trace errors eₜ = ρ̄ₜ δₜ + γₜ₊₁ cₜ eₜ₊₁ and the advantages of IMPALA's policy gradient.

    With δₜ = rₜ₊₁ + γₜ₊₁ v(sₜ₊₁) − v(sₜ), ρ̄ₜ = min(ρ̄, ρₜ) and cₜ = λₜ min(1, ρₜ); the advantage is
    min(ρ̄_pg, ρₜ) (qₜ − v(sₜ)) with qₜ = rₜ₊₁ + γₜ₊₁ [v(sₜ₊₁) + λₜ eₜ₊₁]; past the end e is 0. Names, argument order and
    signs follow RLax (without its ``sample_mask``). Source: Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with
    Importance Weighted Actor-Learner Architectures" (2018), section 4.

    Args:
        v_tm1: values of the states at times 0 … T−1, ``[T]``.
        v_t: values of the states at times 1 … T, ``[T]``.
        r_t: rewards at times 1 … T, ``[T]``.
        discount_t: discounts at times 1 … T, ``[T]`` or a number.
        rho_tm1: importance ratios π(a|s)/μ(a|s) at times 0 … T−1, ``[T]``.
        lambda_: λ, ``[T]`` or a number.
        clip_rho_threshold: ρ̄.
        clip_pg_rho_threshold: ρ̄_pg.
        stop_target_gradients: the targets of the errors are constants: gradients reach ``v_tm1`` only. The advantages
            pass gradients, as in RLax; policy losses stop them.
        mask_t: True (or non-zero) at real steps, ``[T]``; None if all are. The result is 0 at padding.
        time_dim: the axis of time, if there are several: 1 for ``[E, T]``. All arguments are then of the shape of
            ``r_t``, or numbers.

    Returns:
        Errors, advantages and action values.

    Raises:
        ArgumentError: if shapes do not fit, or ``r_t`` has several axes and ``time_dim`` is not given.

    Examples:
        >>> v, rho = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.5, 2.0])
        >>> vtrace_td_error_and_advantage(v[:-1], v[1:], torch.ones(2), 0.5, rho).errors
        tensor([0.7500, 1.0000])
    """
    check_steps(
        "r_t", r_t, v_tm1=v_tm1, v_t=v_t, discount_t=discount_t, rho_tm1=rho_tm1, lambda_=lambda_, mask_t=mask_t
    )
    axis, mask = time_axis("r_t", r_t, time_dim), real_steps(mask_t, r_t)
    arguments = v_tm1, v_t, r_t, discount_t, rho_tm1, lambda_
    values, following, r, discounts, rho, mixing = entries(mask, *arguments)
    delta = rho.clamp(max=clip_rho_threshold) * (r + discounts * following - values)
    errors, _ = compose(delta, discounts * mixing * rho.clamp(max=1), r_t.shape[axis], axis)
    targets = constant(errors + values, stop_target_gradients=stop_target_gradients)
    errors = targets - values if stop_target_gradients else errors
    continued = shift(values, 1, axis) + mixing * shift(errors, 1, axis)
    bootstrap = torch.where(shift(mask, 1, axis), continued, following)
    q_estimate = r + discounts * bootstrap
    advantage = rho.clamp(max=clip_pg_rho_threshold) * (q_estimate - values)
    dtype = result_dtype(r_t, *arguments)
    return VTraceOutput(errors.to(dtype), advantage.to(dtype), q_estimate.to(dtype))
