"""Weights w of the policy-gradient estimator Σₜ wₜ ∇log π(aₜ|sₜ) of one episode; all estimate the same gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.losses import discounted_returns
from persample.rl.diagnostics.scores import checked
from persample.rl.rollouts import Episodes


def total_reward(episodes: Episodes) -> Tensor:
    """Weight every step with the discounted reward of the whole episode: wₜ = R = Σₖ γᵏ rₖ₊₁.

    Args:
        episodes: E episodes, padded to T steps.

    Returns:
        The weights, ``[E, T]``, 0 at padding.

    Examples:
        >>> ones = torch.ones(1, 2)
        >>> total_reward(Episodes(ones, ones, ones, 0.5 * ones, ones.bool()))
        tensor([[1.5000, 1.5000]])
    """
    episodes = checked(episodes, in_order=False)
    return torch.where(episodes.mask_t, _returns(episodes)[:, :1], 0)


def reward_to_go(episodes: Episodes, baseline_t: Tensor | float = 0.0) -> Tensor:
    """Weight every step with the rewards that follow it: wₜ = Σₖ₌ₜ γᵏ rₖ₊₁ − γᵗ bₜ = γᵗ (Gₜ − bₜ).

    Earlier rewards, and any baseline that does not depend on the action, have expectation 0. With discounts below 1 the
    factor γᵗ belongs to the gradient of the discounted return; ``reinforce_loss`` on Gₜ omits it, as is common.

    Source: Williams (1992); Sutton et al., "Policy Gradient Methods for Reinforcement Learning with Function
    Approximation" (2000).

    Args:
        episodes: E episodes, padded to T steps.
        baseline_t: b, a number, ``[T]`` or ``[E, T]``: predicted returns, or ``leave_one_out(episodes)``.

    Returns:
        The weights, ``[E, T]``, 0 at padding.

    Raises:
        ArgumentError: if the shape of ``baseline_t`` does not fit.

    Examples:
        >>> ones = torch.ones(1, 2)
        >>> reward_to_go(Episodes(ones, ones, ones, 0.5 * ones, ones.bool()))
        tensor([[1.5000, 0.5000]])
    """
    episodes = checked(episodes, in_order=False)
    shape = episodes.r_t.shape
    if isinstance(baseline_t, Tensor) and baseline_t.shape not in {shape[2:], shape[1:], shape}:
        expected, received = f"shape [], {list(shape[1:])} or {list(shape)}", f"shape {list(baseline_t.shape)}"
        fix = "Pass one for all, one per time step, or one per step of every episode."
        raise ArgumentError.about("baseline_t", expected=expected, received=received, fix=fix)
    discounts = torch.where(episodes.mask_t, episodes.discount_t, 1)
    gamma_t = torch.cat([torch.ones_like(discounts[:, :1]), discounts[:, :-1]], 1).cumprod(1)
    return torch.where(episodes.mask_t, gamma_t * (_returns(episodes) - baseline_t), 0)


def leave_one_out(episodes: Episodes) -> Tensor:
    """Average the returns of the other episodes at the same time step: an unbiased baseline.

    The mean over all episodes would be biased, as it depends on the episode's own actions. The baseline is 0 where no
    other episode is running.
    Source: Kool, van Hoof, Welling, "Buy 4 REINFORCE Samples, Get a Baseline for Free!" (2019).

    Args:
        episodes: E episodes, padded to T steps.

    Returns:
        The baselines bₜ, ``[E, T]``.

    Examples:
        >>> r = torch.tensor([[1.0], [3.0], [5.0]])
        >>> leave_one_out(Episodes(r, r, r, r * 0, r.bool())).tolist()
        [[4.0], [3.0], [2.0]]
    """
    episodes = checked(episodes, in_order=False)
    returns, running = _returns(episodes), episodes.mask_t.sum(0)
    others = returns.sum(0) - returns
    return others / (running - episodes.mask_t.long()).clamp(min=1)


def _returns(episodes: Episodes) -> Tensor:
    """Return Gₜ without bootstrap, ``[E, T]``, 0 at padding."""
    return discounted_returns(episodes.r_t, episodes.discount_t, 0.0, mask_t=episodes.mask_t, time_dim=1)
