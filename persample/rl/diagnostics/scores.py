"""The loss Σₜ wₜ log π(aₜ|sₜ) of one episode, sample weights taken from aux, and weights of the estimator.

All weights w of the policy-gradient estimator Σₜ wₜ ∇log π(aₜ|sₜ) of one episode estimate the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.factors import Op
from persample.gradients import Gradients
from persample.losses import discounted_returns
from persample.losses.common import unpadded
from persample.reductions import Reduction
from persample.rl.rollouts import Episodes
from persample.utils.trees import Tree

LogProbFn = Callable[..., Tensor]


@dataclass(frozen=True)
class WeightedByAux(Reduction):
    """A reduction of samples weighted by the aux output of the loss.

    One pass computes several weightings; ``per_sample_grads(weights=…)`` takes one.

    Args:
        reduction: the reduction to apply.
        column: the index into the weights ``[K]`` that the loss returns, which are not negative.
    """

    reduction: Reduction
    column: int
    uses: ClassVar[frozenset[Op]] = frozenset({Op.second_moment, Op.weighted_sum})

    def lift(self, gradients: Gradients) -> Tree:
        """Return the mergeable tree of the inner reduction, of weighted samples."""
        weights = gradients.aux[:, self.column].double()
        return self.reduction.lift(replace(gradients, weights=weights))

    def finish(self, merged: object) -> Tree:
        """Return the result of the inner reduction."""
        return self.reduction.finish(merged)


def score_fn(log_prob_fn: LogProbFn) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make the loss of one episode, whose gradient is Σₜ wₜ ∇log π(aₜ|sₜ).

    Args:
        log_prob_fn: ``(params, obs_t [T, *obs], a_t [T, *act]) → [T]``, the log-probabilities of the actions taken.

    Returns:
        A function ``(params, obs_t, a_t, weight_t, aux)`` → the sum and ``aux``.
    """

    def score(params: Tree, *sample: Tensor) -> tuple[Tensor, Tensor]:
        obs_t, a_t, weight_t, aux = sample
        log_pi_t = log_prob_fn(params, obs_t, a_t)
        if not isinstance(log_pi_t, Tensor) or log_pi_t.shape != weight_t.shape:
            received = f"shape {list(log_pi_t.shape)}" if isinstance(log_pi_t, Tensor) else type(log_pi_t).__name__
            fix = "It is called as log_prob_fn(params, obs_t, a_t) with one episode; see categorical_log_prob."
            expected = f"a function that returns log π(aₜ|sₜ), shape {list(weight_t.shape)}"
            raise ArgumentError.about("log_prob_fn", expected=expected, received=received, fix=fix)
        return (log_pi_t * weight_t).sum(), aux

    return score


def score_batch(episodes: Episodes, weight_t: Tensor, aux: Tensor, argument: str = "weight_t") -> tuple[Tensor, ...]:
    """Return the batch of ``score_fn``."""
    shape = list(episodes.mask_t.shape)
    if not isinstance(weight_t, Tensor) or list(weight_t.shape) != shape:
        fix = "One weight per step; see persample.rl.diagnostics.reward_to_go."
        received = f"shape {list(weight_t.shape)}" if isinstance(weight_t, Tensor) else type(weight_t).__name__
        raise ArgumentError.about(argument, expected=f"shape {shape}", received=received, fix=fix)
    obs_t, a_t, weight_t = (unpadded(episodes.mask_t, x) for x in (episodes.obs_t, episodes.a_t, weight_t))
    return obs_t, a_t, weight_t, aux


def checked(episodes: Episodes, *, in_order: bool = True) -> Episodes:
    """Check the episodes of a diagnostic."""
    missing = [field for field in Episodes._fields if not hasattr(episodes, field)]
    if missing:
        fix = f"Pass Episodes({', '.join(Episodes._fields)}), as collect_episodes returns it."
        raise ArgumentError.about("episodes", expected="Episodes", received=type(episodes).__name__, fix=fix)
    found = Episodes(*(getattr(episodes, field) for field in Episodes._fields))
    for field in ("r_t", "discount_t", "mask_t"):
        value, like = getattr(found, field), found.r_t
        if not isinstance(value, Tensor) or value.ndim != 2 or value.shape != like.shape:
            expected = "a tensor of shape [E, T]" + (f", {list(like.shape)} as of r_t" if field != "r_t" else "")
            received = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            fix = "Episodes are rows; where all steps are real, mask_t is torch.ones_like(r_t, dtype=torch.bool)."
            raise ArgumentError.about(f"episodes.{field}", expected=expected, received=received, fix=fix)
    mask_t = found.mask_t.bool()
    if in_order and not bool(mask_t[:, :1].all() & (mask_t[:, 1:] <= mask_t[:, :-1]).all()):
        expected, received = "real steps first, and padding after them, in every row", "others"
        fix = "Is time the first axis? Transpose all fields: x.transpose(0, 1)."
        raise ArgumentError.about("episodes.mask_t", expected=expected, received=received, fix=fix)
    return Episodes(*found[:-1], mask_t)


def check_enough(episodes: Episodes) -> Episodes:
    """Return what ``checked`` returns; reject less than two episodes."""
    episodes = checked(episodes)
    if (count := len(episodes.mask_t)) < 2:
        fix = "One episode has no spread: collect more."
        raise ArgumentError.about("episodes", expected="2 or more", received=f"{count}", fix=fix)
    return episodes


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
