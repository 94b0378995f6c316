"""Gaussian policies for continuous actions: a diagonal normal distribution at every step of one episode."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.losses.common import check_rows, check_same, expand_to_steps, over_time, overridable, padding, unpadded
from persample.losses.policy_gradient import score_loss


@overridable
def gaussian_log_prob(mu_t: Tensor, sigma_t: Tensor | float, a_t: Tensor) -> Tensor:
    """Compute log π(aₜ|sₜ) = −Σₖ [½ ((a − μ)/σ)² + log σ + ½ log 2π] of a diagonal Gaussian policy.

    For ratios of two policies (PPO, V-trace), take the exponential of a difference.

    Args:
        mu_t: means, ``[T, D]`` (any leading axes).
        sigma_t: standard deviations, positive, ``[T, D]``, ``[D]`` or a number.
        a_t: actions taken, ``[T, D]``.

    Returns:
        The log-densities, ``[T]``.

    Raises:
        ArgumentError: if shapes do not fit.

    Examples:
        >>> gaussian_log_prob(torch.zeros(1, 2), 1.0, torch.zeros(1, 2))
        tensor([-1.8379])
    """
    check_same(mu_t=mu_t, a_t=a_t)
    sigma_t = _every_step(sigma_t, mu_t)
    scaled = (a_t - mu_t) / sigma_t
    return -(0.5 * scaled.square() + sigma_t.log() + 0.5 * math.log(2 * math.pi)).sum(-1)


@overridable
def gaussian_policy_gradient_loss(
    mu_t: Tensor,
    sigma_t: Tensor | float,
    a_t: Tensor,
    adv_t: Tensor,
    w_t: Tensor | float = 1.0,
    use_stop_gradient: bool = True,
    *,
    mask_t: Tensor | None = None,
    reduction: str = "sum",
) -> Tensor:
    """Compute the policy-gradient loss −Σₜ wₜ log π(aₜ|sₜ) Aₜ of one episode with a diagonal Gaussian policy.

    No gradient flows through the sampled actions. Source: Williams, "Simple Statistical
    Gradient-Following Algorithms" (1992), section 6.

    Args:
        mu_t: means, ``[T, D]``.
        sigma_t: standard deviations, positive, ``[T, D]``, ``[D]`` or a number.
        a_t: actions taken, ``[T, D]``.
        adv_t: advantages (or returns) of the steps, ``[T]``.
        w_t: weights of the steps, ``[T]`` or a number.
        use_stop_gradient: no gradient flows through the advantages.
        mask_t: True (or non-zero) at real steps, ``[T]``; None if all are.
        reduction: over time: "sum", "mean" over unmasked steps (0 if there are none) or "none".

    Returns:
        The loss, ``[]``; ``[T]`` for "none".

    Raises:
        ArgumentError: if shapes do not fit, or ``reduction`` is unknown.

    Examples:
        >>> mu, a_t = torch.zeros(2, 1), torch.tensor([[1.0], [2.0]])
        >>> gaussian_policy_gradient_loss(mu, 1.0, a_t, torch.tensor([1.0, 0.0]))
        tensor(1.4189)
    """
    check_same(mu_t=mu_t, a_t=a_t)
    check_rows("mu_t", mu_t, mask_t=mask_t)
    mask = padding(mask_t, mu_t[..., 0])
    sigma = unpadded(mask, _every_step(sigma_t, mu_t), fill=1)
    log_pi_a_t = gaussian_log_prob(unpadded(mask, mu_t), sigma, unpadded(mask, a_t.detach()))
    return score_loss(log_pi_a_t, adv_t, w_t, mask, use_stop_gradient, reduction)


@overridable
def gaussian_entropy_loss(
    sigma_t: Tensor, w_t: Tensor | float = 1.0, *, mask_t: Tensor | None = None, reduction: str = "sum"
) -> Tensor:
    """Compute minus the entropy, −Σₜ wₜ Σₖ [log σ + ½ log 2πe], of a diagonal Gaussian policy in one episode.

    Args:
        sigma_t: standard deviations, positive, ``[T, D]``.
        w_t: weights of the steps, ``[T]`` or a number.
        mask_t: True (or non-zero) at real steps, ``[T]``; None if all are.
        reduction: over time: "sum", "mean" over unmasked steps (0 if there are none) or "none".

    Returns:
        The loss, ``[]``; ``[T]`` for "none".

    Raises:
        ArgumentError: if shapes do not fit, or ``reduction`` is unknown.

    Examples:
        >>> gaussian_entropy_loss(torch.ones(2, 1))
        tensor(-2.8379)
    """
    check_rows("sigma_t", sigma_t, w_t=w_t, mask_t=mask_t)
    mask = padding(mask_t, sigma_t[..., 0])
    entropy_t = (unpadded(mask, sigma_t, fill=1).log() + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)
    return over_time(-entropy_t * unpadded(mask, expand_to_steps(w_t, entropy_t)), mask, reduction)


def _every_step(sigma_t: Tensor | float, mu_t: Tensor) -> Tensor:
    shape = list(sigma_t.shape) if isinstance(sigma_t, Tensor) else []
    if shape != list(mu_t.shape[mu_t.ndim - len(shape) :]):
        expected = f"a number or shape {list(mu_t.shape[-1:])} or {list(mu_t.shape)}"
        fix = "Pass one for all, one per dimension, or one per dimension of every step."
        raise ArgumentError.about("sigma_t", expected=expected, received=f"shape {shape}", fix=fix)
    return torch.ones_like(mu_t) * sigma_t
