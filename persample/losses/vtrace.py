"""V-trace: off-policy TD errors and advantages of a sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from persample.losses.check import check_steps, is_on, overridable, time_axis
from persample.losses.recursion import compose, entries, result_dtype, shift
from persample.losses.steps import real_steps
from persample.utils.trees import stop_gradient


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
    if is_on("stop_target_gradients", stop_target_gradients):
        errors = stop_gradient(errors + values) - values
    continued = shift(values, 1, axis) + mixing * shift(errors, 1, axis)
    bootstrap = torch.where(shift(mask, 1, axis), continued, following)
    q_estimate = r + discounts * bootstrap
    advantage = rho.clamp(max=clip_pg_rho_threshold) * (q_estimate - values)
    dtype = result_dtype(r_t, *arguments)
    return VTraceOutput(errors.to(dtype), advantage.to(dtype), q_estimate.to(dtype))
