"""Advantage actor-critic over one episode."""

from __future__ import annotations

from torch import Tensor

from persample.losses.check import check_axes, check_steps, overridable
from persample.losses.policy_gradient import entropy_loss, policy_gradient_loss
from persample.losses.returns import truncated_generalized_advantage_estimation
from persample.losses.steps import over_time, padding, unpadded
from persample.utils.trees import stop_gradient


@overridable
def advantage_actor_critic_loss(
    logits_t: Tensor,
    values: Tensor,
    a_t: Tensor,
    r_t: Tensor,
    discount_t: Tensor | float,
    lambda_: Tensor | float = 1.0,
    *,
    value_cost: float = 0.5,
    entropy_cost: float = 0.01,
    mask_t: Tensor | None = None,
    reduction: str = "sum",
) -> Tensor:
    """Compute the loss of advantage actor-critic: Σₜ [−log π(aₜ|sₜ) Âₜ + c_v (Gₜ − v(sₜ))² − c_e H(π(·|sₜ))].

    Âₜ are the generalized advantages, Gₜ = Âₜ + v(sₜ) the λ-returns. Both are constants: the policy term has no
    gradient in ``values``, and the critic's target passes no gradient. Source: Mnih et al., "Asynchronous Methods for
    Deep Reinforcement Learning" (2016), section 4; with λ, Schulman et al., "High-Dimensional Continuous Control Using
    Generalized Advantage Estimation" (2016).

    Args:
        logits_t: unnormalized log-probabilities of the actions at times 0 … T−1, ``[T, A]``.
        values: values of the states at times 0 … T, ``[T + 1]``; the value after the last real step bootstraps.
        a_t: actions taken at times 0 … T−1, integers, ``[T]``.
        r_t: rewards at times 1 … T, ``[T]``.
        discount_t: discounts at times 1 … T (0 where the episode terminated), ``[T]`` or a number.
        lambda_: λ, ``[T]`` or a number; 1 gives whole returns, 0 single TD errors.
        value_cost: c_v.
        entropy_cost: c_e.
        mask_t: True (or non-zero) at real steps, ``[T]``; None if all are. Padding contributes exactly zero.
        reduction: over time: "sum", "mean" over unmasked steps (0 if there are none) or "none".

    Returns:
        The loss, ``[]``; ``[T]`` for "none".

    Raises:
        ArgumentError: if shapes do not fit, actions are not integers, or ``reduction`` is unknown.

    Examples:
        >>> import torch
        >>> logits, values, a_t = torch.zeros(2, 2), torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0, 1])
        >>> advantage_actor_critic_loss(logits, values, a_t, torch.ones(2), 1.0, entropy_cost=0.0)
        tensor(1.1931)
    """
    check_axes(1, r_t=r_t)
    check_steps("r_t", r_t, mask_t=mask_t)
    mask = padding(mask_t, r_t)
    advantage_t = truncated_generalized_advantage_estimation(r_t, discount_t, lambda_, values, mask_t=mask)
    actor_t = policy_gradient_loss(logits_t, a_t, advantage_t, mask_t=mask, reduction="none")
    v_tm1 = unpadded(mask, values[:-1])
    critic_t = (stop_gradient(advantage_t + v_tm1) - v_tm1).square()
    entropy_t = entropy_loss(logits_t, mask_t=mask, reduction="none")
    return over_time(actor_t + value_cost * critic_t + entropy_cost * entropy_t, mask, reduction)
