"""Categorical policies: log-probabilities of actions, and losses of one episode.

Padding contributes exactly zero to loss and gradient, even if it is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from persample.losses.common import (
    check_actions,
    check_axes,
    check_not_negative,
    check_rows,
    check_same,
    check_steps,
    constant,
    expand_to_steps,
    of_actions,
    over_time,
    overridable,
    padding,
    unpadded,
)
from persample.losses.returns import truncated_generalized_advantage_estimation
from persample.utils.trees import stop_gradient


@overridable
def categorical_log_prob(logits_t: Tensor, a_t: Tensor) -> Tensor:
    """Compute log π(aₜ|sₜ) of a categorical policy.

    The result is finite for all finite logits. A logit of −∞ gives its action probability 0.

    Args:
        logits_t: unnormalized log-probabilities of the actions, ``[*, A]``.
        a_t: actions, integers, ``[*]``.

    Returns:
        The log-probabilities, ``[*]``.

    Raises:
        ArgumentError: if shapes do not fit, or actions are not integers.

    Examples:
        >>> categorical_log_prob(torch.tensor([[0.0, 0.0], [1000.0, -1000.0]]), torch.tensor([0, 1]))
        tensor([-6.9315e-01, -2.0000e+03])
    """
    check_actions("logits_t", logits_t, a_t=a_t)
    return of_actions(torch.log_softmax(logits_t, dim=-1), a_t)


@overridable
def categorical_importance_sampling_ratios(pi_logits_t: Tensor, mu_logits_t: Tensor, a_t: Tensor) -> Tensor:
    """Compute the ratios π(aₜ|sₜ)/μ(aₜ|sₜ) of two categorical policies.

    Name and argument order follow RLax.

    Args:
        pi_logits_t: unnormalized log-probabilities under the target policy π, ``[*, A]``.
        mu_logits_t: unnormalized log-probabilities under the behaviour policy μ, ``[*, A]``.
        a_t: actions taken by μ, integers, ``[*]``.

    Returns:
        The ratios, ``[*]``.

    Raises:
        ArgumentError: if shapes do not fit, or actions are not integers.

    Examples:
        >>> pi, mu = torch.tensor([[3.0, 1.0]]).log(), torch.zeros(1, 2)
        >>> categorical_importance_sampling_ratios(pi, mu, torch.tensor([0]))
        tensor([1.5000])
    """
    check_same(pi_logits_t=pi_logits_t, mu_logits_t=mu_logits_t)
    return (categorical_log_prob(pi_logits_t, a_t) - categorical_log_prob(mu_logits_t, a_t)).exp()


@overridable
def reinforce_loss(
    logits_t: Tensor, a_t: Tensor, return_t: Tensor, mask_t: Tensor | None = None, *, reduction: str = "sum"
) -> Tensor:
    """Compute the REINFORCE loss −Σₜ log π(aₜ|sₜ) Gₜ of one episode.

    Its gradient with ``reduction="sum"`` is minus the REINFORCE estimator of Williams, "Simple Statistical
    Gradient-Following Algorithms" (1992). No gradient flows through ``return_t``. Padding contributes exactly zero to
    loss and gradient, even if it contains NaN, ∞ or an action of −1.

    Args:
        logits_t: unnormalized log-probabilities of the actions, ``[T, A]``.
        a_t: actions taken, integers, ``[T]``.
        return_t: returns (or advantages) of the steps, ``[T]``.
        mask_t: True (or non-zero) at real steps, ``[T]``; None if all are.
        reduction: over time: "sum" (the estimator), "mean" over unmasked steps (0 if there are none) or "none".

    Returns:
        The loss, ``[]``; ``[T]`` for "none".

    Raises:
        ArgumentError: if shapes do not fit, actions are not integers, or ``reduction`` is unknown.

    Examples:
        >>> logits, a_t = torch.zeros(3, 2), torch.tensor([0, 1, -1])
        >>> reinforce_loss(logits, a_t, torch.tensor([1.0, 1.0, torch.nan]), torch.tensor([True, True, False]))
        tensor(1.3863)
    """
    check_rows("logits_t", logits_t, return_t=return_t)
    return policy_gradient_loss(logits_t, a_t, return_t, mask_t=mask_t, reduction=reduction)


@overridable
def policy_gradient_loss(
    logits_t: Tensor,
    a_t: Tensor,
    adv_t: Tensor,
    w_t: Tensor | float = 1.0,
    use_stop_gradient: bool = True,
    *,
    mask_t: Tensor | None = None,
    reduction: str = "sum",
) -> Tensor:
    """Compute the policy-gradient loss −Σₜ wₜ log π(aₜ|sₜ) Aₜ of one episode.

    Name and argument order follow RLax, which returns the value of ``reduction="mean"``. Source: Williams, "Simple
    Statistical Gradient-Following Algorithms" (1992).

    Args:
        logits_t: unnormalized log-probabilities of the actions, ``[T, A]``.
        a_t: actions taken, integers, ``[T]``.
        adv_t: advantages (or returns) of the steps, ``[T]``.
        w_t: weights of the steps, ``[T]`` or a number.
        use_stop_gradient: no gradient flows through the advantages.
        mask_t: True (or non-zero) at real steps, ``[T]``; None if all are.
        reduction: over time: "sum", "mean" over unmasked steps (0 if there are none) or "none".

    Returns:
        The loss, ``[]``; ``[T]`` for "none".

    Raises:
        ArgumentError: if shapes do not fit, actions are not integers, or ``reduction`` is unknown.

    Examples:
        >>> logits, a_t = torch.zeros(2, 2), torch.tensor([0, 1])
        >>> policy_gradient_loss(logits, a_t, torch.tensor([1.0, 3.0]), torch.tensor([1.0, 0.5]), reduction="mean")
        tensor(0.8664)
    """
    check_rows("logits_t", logits_t, mask_t=mask_t, a_t=a_t)
    mask = padding(mask_t, a_t)
    log_pi_a_t = categorical_log_prob(unpadded(mask, logits_t), unpadded(mask, a_t))
    return score_loss(log_pi_a_t, adv_t, w_t, mask, use_stop_gradient, reduction)


@overridable
def entropy_loss(
    logits_t: Tensor, w_t: Tensor | float = 1.0, *, mask_t: Tensor | None = None, reduction: str = "sum"
) -> Tensor:
    """Compute minus the entropy, Σₜ wₜ Σₐ π(a|sₜ) log π(a|sₜ), of a categorical policy in one episode.

    Name and argument order follow RLax, which returns the value of ``reduction="mean"``. Actions of probability 0
    (logits of −∞) add nothing. Source: Williams, Peng, "Function Optimization Using Connectionist RL Algorithms"
    (1991).

    Args:
        logits_t: unnormalized log-probabilities of the actions, ``[T, A]``.
        w_t: weights of the steps, ``[T]`` or a number.
        mask_t: True (or non-zero) at real steps, ``[T]``; None if all are.
        reduction: over time: "sum", "mean" over unmasked steps (0 if there are none) or "none".

    Returns:
        The loss, ``[]``; ``[T]`` for "none".

    Raises:
        ArgumentError: if shapes do not fit, or ``reduction`` is unknown.

    Examples:
        >>> entropy_loss(torch.tensor([[0.0, 0.0], [1000.0, -1000.0]]), reduction="none")
        tensor([-0.6931,  0.0000])
    """
    check_rows("logits_t", logits_t, w_t=w_t, mask_t=mask_t)
    mask = padding(mask_t, logits_t[..., 0])
    log_pi = torch.log_softmax(unpadded(mask, logits_t), dim=-1)
    negentropy_t = (log_pi.exp() * log_pi.clamp(min=torch.finfo(log_pi.dtype).min)).sum(-1)
    return over_time(negentropy_t * unpadded(mask, expand_to_steps(w_t, negentropy_t)), mask, reduction)


@overridable
def clipped_surrogate_pg_loss(
    prob_ratios_t: Tensor,
    adv_t: Tensor,
    epsilon: float,
    use_stop_gradient: bool = True,
    *,
    mask_t: Tensor | None = None,
    reduction: str = "sum",
) -> Tensor:
    """Compute PPO's loss −Σₜ min(ρₜ Aₜ, clip(ρₜ, 1 − ε, 1 + ε) Aₜ) of one episode, ρₜ = π(aₜ|sₜ)/π_old(aₜ|sₜ).

    Name and argument order follow RLax, which returns the value of ``reduction="mean"``. Source: Schulman et al.,
    "Proximal Policy Optimization Algorithms" (2017), equation 7.

    Args:
        prob_ratios_t: the ratios ρ, ``[T]`` (``categorical_importance_sampling_ratios`` computes them).
        adv_t: advantages of the steps, ``[T]``.
        epsilon: ε, at least 0.
        use_stop_gradient: no gradient flows through the advantages.
        mask_t: True (or non-zero) at real steps, ``[T]``; None if all are.
        reduction: over time: "sum", "mean" over unmasked steps (0 if there are none) or "none".

    Returns:
        The loss, ``[]``; ``[T]`` for "none".

    Raises:
        ArgumentError: if shapes do not fit, ``epsilon`` is negative, or ``reduction`` is unknown.

    Examples:
        >>> clipped_surrogate_pg_loss(torch.tensor([1.5, 0.5]), torch.tensor([1.0, 1.0]), 0.25, reduction="none")
        tensor([-1.2500, -0.5000])
    """
    check_steps("prob_ratios_t", prob_ratios_t, adv_t=adv_t, mask_t=mask_t)
    check_not_negative("epsilon", epsilon, "Ratios are clipped to 1 ± ε; 0.2 is usual.")
    mask = padding(mask_t, prob_ratios_t)
    ratios, adv = unpadded(mask, prob_ratios_t), unpadded(mask, expand_to_steps(adv_t, prob_ratios_t))
    adv = constant(adv, use_stop_gradient=use_stop_gradient)
    return over_time(-torch.minimum(ratios * adv, ratios.clamp(1 - epsilon, 1 + epsilon) * adv), mask, reduction)


def score_loss(
    log_pi_a_t: Tensor, adv_t: Tensor, w_t: Tensor | float, mask: Tensor | None, use_stop_gradient: bool, reduction: str
) -> Tensor:
    """Compute −Σₜ wₜ log π(aₜ|sₜ) Aₜ from log-probabilities ``[T]`` that are finite at padding."""
    check_steps("a_t", log_pi_a_t, adv_t=adv_t, w_t=w_t)
    adv = constant(unpadded(mask, expand_to_steps(adv_t, log_pi_a_t)), use_stop_gradient=use_stop_gradient)
    loss_t = log_pi_a_t * -adv  # adv is usually a constant, so that its negation needs no backward pass
    if not (isinstance(w_t, int | float) and w_t == 1):
        loss_t = loss_t * unpadded(mask, expand_to_steps(w_t, log_pi_a_t))
    return over_time(loss_t, mask, reduction)


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
