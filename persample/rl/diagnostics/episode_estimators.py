"""Diagnostics of policy gradients on a batch of episodes: norms, cosines and noise scale, variances, baselines.

All weights w of the policy-gradient estimator Σₜ wₜ ∇log π(aₜ|sₜ) of one episode here estimate the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.inputs import Engine, Outputs
from persample.losses import discounted_returns
from persample.losses.common import unpadded
from persample.per_sample import per_sample_grads
from persample.reductions import CosineSimilarity, NoiseScale, NoiseScaleEstimate, Norm, SecondMoment
from persample.reductions.base import Reduce
from persample.rl.rollouts import Episodes
from persample.utils.trees import Tree, tree_map

LogProbFn = Callable[..., Tensor]


class EpisodeGradients(NamedTuple):
    """The result of ``episode_gradients``.

    Attributes:
        norms: Euclidean norms of the episodes' gradients, ``[E]``.
        cosines: cosines between the episodes' gradients, ``[E, E]``.
        noise: variance of one episode's gradient, squared norm of the mean gradient, and their ratio.
        batch_size: the number of episodes, ``[]``, at which noise and signal are equal, from this ratio; ∞ where the
            signal of this batch is not measurable.
    """

    norms: Tensor
    cosines: Tensor
    noise: NoiseScaleEstimate
    batch_size: Tensor


def episode_gradients(
    log_prob_fn: LogProbFn,
    params: Tree,
    episodes: Episodes,
    weight_t: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    engine: Engine = "eager",
) -> EpisodeGradients:
    """Measure the gradients gᵢ = Σₜ wₜ ∇log π(aₜ|sₜ) of a batch of episodes, in one pass.

    Source of the batch size: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018).

    Args:
        log_prob_fn: ``(params, obs_t [T, *obs], a_t [T, *act]) → [T]``, log π(aₜ|sₜ) of one episode's actions.
        params: the policy: an ``nn.Module`` or a tree of tensors.
        episodes: E ≥ 2 episodes, padded to T steps; the content of padding has no effect.
        weight_t: w, ``[E, T]``; None for ``reward_to_go(episodes)``.
        chunk_size: the number of episodes processed at a time.
        engine: the engine of ``per_sample_grads``.

    Returns:
        Norms, cosines, noise scale and the batch size that follows from it.

    Raises:
        ArgumentError: if shapes do not fit, or there are fewer than 2 episodes.

    Examples:
        >>> from persample.losses import categorical_log_prob
        >>> from persample.rl import categorical_policy, collect_episodes, make_envs
        >>> policy = torch.nn.Linear(4, 2)
        >>> episodes = collect_episodes(make_envs("CartPole-v1"), categorical_policy(policy), 16, seed=0)
        >>> found = episode_gradients(lambda p, obs_t, a_t: categorical_log_prob(p(obs_t), a_t), policy, episodes)
        >>> found.norms.shape, found.cosines.shape
        (torch.Size([16]), torch.Size([16, 16]))
    """
    episodes = _checked(episodes, several=True)
    weight_t = reward_to_go(episodes) if weight_t is None else weight_t
    wanted = (Norm(), CosineSimilarity(), NoiseScale())
    weights = _weights(episodes, weight_t)
    norms, cosines, noise = _scores(log_prob_fn, params, episodes, weights, wanted, chunk_size, engine)
    batch_size = torch.where(noise.squared_mean > 0, noise.noise_scale.ceil().clamp(min=1), torch.inf)
    return EpisodeGradients(norms, cosines, noise, batch_size)


def estimator_variances(
    log_prob_fn: LogProbFn,
    params: Tree,
    episodes: Episodes,
    weights_t: Mapping[str, Tensor] | None = None,
    *,
    chunk_size: int | None = None,
    engine: Engine = "eager",
) -> dict[str, NoiseScaleEstimate]:
    """Compare estimators Σₜ wₜ ∇log π(aₜ|sₜ) of the policy gradient on the same episodes, in one pass.

    ``covariance_trace`` is the variance of one episode's estimate, summed over all parameters. The variance of a
    mean over E episodes is E times smaller.

    Args:
        log_prob_fn: ``(params, obs_t [T, *obs], a_t [T, *act]) → [T]``, log π(aₜ|sₜ) of one episode's actions.
        params: the policy: an ``nn.Module`` or a tree of tensors.
        episodes: E ≥ 2 episodes, padded to T steps; the content of padding has no effect.
        weights_t: the w of each estimator, ``[E, T]``, by name; None for "total reward", "reward-to-go" and "baseline",
            which is reward-to-go minus the mean of the other episodes (``leave_one_out``).
        chunk_size: the number of episodes processed at a time.
        engine: the engine of ``per_sample_grads``.

    Returns:
        Variance, squared norm of the mean, and noise scale of each estimator, by name.

    Raises:
        ArgumentError: if shapes do not fit, there is no estimator, or fewer than 2 episodes.

    Examples:
        >>> from persample.losses import categorical_log_prob
        >>> from persample.rl import categorical_policy, collect_episodes, make_envs
        >>> policy = torch.nn.Linear(4, 2)
        >>> episodes = collect_episodes(make_envs("CartPole-v1"), categorical_policy(policy), 32, seed=0)
        >>> found = estimator_variances(lambda p, obs_t, a_t: categorical_log_prob(p(obs_t), a_t), policy, episodes)
        >>> bool(found["baseline"].covariance_trace < found["total reward"].covariance_trace)
        True
    """
    episodes = _checked(episodes, several=True)
    if weights_t is None:
        baseline = reward_to_go(episodes, leave_one_out(episodes))
        plain = {"total reward": total_reward(episodes), "reward-to-go": reward_to_go(episodes)}
        weights_t = {**plain, "baseline": baseline}
    if not isinstance(weights_t, Mapping) or not weights_t:
        received = "an empty dict" if isinstance(weights_t, Mapping) else type(weights_t).__name__
        fix = "Pass {'name': weight_t}, or leave it out for the usual three."
        raise ArgumentError.about("weights_t", expected="a dict of weights by name", received=received, fix=fix)
    rows = [_weights(episodes, weight_t, f"weights_t[{name!r}]") for name, weight_t in weights_t.items()]
    found = _scores(log_prob_fn, params, episodes, torch.stack(rows, 1), NoiseScale(), chunk_size, engine)
    return {name: NoiseScaleEstimate(*(x[k] for x in found)) for k, name in enumerate(weights_t)}


def optimal_baseline(
    log_prob_fn: LogProbFn,
    params: Tree,
    episodes: Episodes,
    *,
    per_param: bool = False,
    chunk_size: int | None = None,
    engine: Engine = "eager",
) -> Tree:
    """Compute the constant baseline b that minimizes E‖(R − b) s‖², with s = Σₜ ∇log π(aₜ|sₜ), in one pass.

    b = E[‖s‖² R] / E[‖s‖²]; ``per_param`` gives one per entry k, E[sₖ² R] / E[sₖ²]. R is the discounted reward of
    an episode. Use it as weights ``total_reward(episodes) - b``, or per entry as Σᵢ (Rᵢ − bₖ) sᵢₖ.

    Source: Weaver, Tao, "The Optimal Reward Baseline for Gradient-Based Reinforcement Learning" (2001); per parameter
    Peters, Schaal, "Reinforcement Learning of Motor Skills with Policy Gradients" (2008), section 3.2.

    Args:
        log_prob_fn: ``(params, obs_t [T, *obs], a_t [T, *act]) → [T]``, log π(aₜ|sₜ) of one episode's actions.
        params: the policy: an ``nn.Module`` or a tree of tensors.
        episodes: E ≥ 2 episodes, padded to T steps; the content of padding has no effect.
        per_param: one baseline per entry of the parameters.
        chunk_size: the number of episodes processed at a time.
        engine: the engine of ``per_sample_grads``.

    Returns:
        The baseline, ``[]``; with ``per_param`` a tree like the parameters. The mean of R where the gradient is 0.

    Raises:
        ArgumentError: if shapes do not fit, or there are fewer than 2 episodes.

    Examples:
        >>> from persample.losses import categorical_log_prob
        >>> from persample.rl import categorical_policy, collect_episodes, make_envs
        >>> policy = torch.nn.Linear(4, 2)
        >>> episodes = collect_episodes(make_envs("CartPole-v1"), categorical_policy(policy), 16, seed=0)
        >>> b = optimal_baseline(lambda p, obs_t, a_t: categorical_log_prob(p(obs_t), a_t), policy, episodes)
        >>> bool(b > 1)  # long episodes have large scores, and count more than short ones
        True
    """
    episodes = _checked(episodes, several=True)
    reward = total_reward(episodes)[:, 0]
    above = reward - reward.min()  # weights are not negative, and a baseline moves with the reward
    ones = _weights(episodes, torch.ones_like(episodes.r_t))
    if not per_param:
        squared = _scores(log_prob_fn, params, episodes, ones, Norm(), chunk_size, engine).square()
        b = reward.min() + (squared * above).sum() / squared.sum()
        return torch.where(squared.sum() > 0, b, reward.mean())
    both = torch.stack([ones, above.sqrt()[:, None] * ones], 1)  # second moments E[s²] and E[(R − min R) s²]
    moments = _scores(log_prob_fn, params, episodes, both, SecondMoment(), chunk_size, engine)

    def ratio(moment: Tensor) -> Tensor:
        plain, weighted = moment
        return torch.where(plain > 0, reward.min() + weighted / plain, reward.mean()).to(plain.dtype)

    return tree_map(ratio, moments)


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
    episodes = _checked(episodes)
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
    episodes = _checked(episodes)
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
    episodes = _checked(episodes)
    returns, running = _returns(episodes), episodes.mask_t.sum(0)
    others = returns.sum(0) - returns
    return others / (running - episodes.mask_t.long()).clamp(min=1)


def _scores(
    log_prob_fn: LogProbFn,
    params: Tree,
    episodes: Episodes,
    weights: Tensor,
    wanted: Reduce,
    chunk_size: int | None,
    engine: Engine,
) -> Tree:
    """Reduce the gradients Σₜ wₜ ∇log π(aₜ|sₜ) of episodes, for weights ``[E, T]``, or ``[E, K, T]`` for K of each."""

    def score(params: Tree, obs_t: Tensor, a_t: Tensor, weight_t: Tensor) -> Tensor:
        log_pi_t = log_prob_fn(params, obs_t, a_t)
        if not isinstance(log_pi_t, Tensor) or log_pi_t.shape != weight_t.shape[-1:]:
            received = f"shape {list(log_pi_t.shape)}" if isinstance(log_pi_t, Tensor) else type(log_pi_t).__name__
            fix = "It is called as log_prob_fn(params, obs_t, a_t) with one episode; see categorical_log_prob."
            expected = f"a function that returns log π(aₜ|sₜ), shape {list(weight_t.shape[-1:])}"
            raise ArgumentError.about("log_prob_fn", expected=expected, received=received, fix=fix)
        return (log_pi_t * weight_t).sum(-1)

    obs_t, a_t = (unpadded(episodes.mask_t, x) for x in (episodes.obs_t, episodes.a_t))
    outputs: Outputs = "rows" if weights.ndim == 3 else "scalar"
    batch = obs_t, a_t, weights
    return per_sample_grads(score, params, batch, wanted, outputs=outputs, chunk_size=chunk_size, engine=engine)


def _weights(episodes: Episodes, weight_t: Tensor, argument: str = "weight_t") -> Tensor:
    """Return weights of steps, 0 at padding; reject any other shape than ``[E, T]``."""
    shape = list(episodes.mask_t.shape)
    if not isinstance(weight_t, Tensor) or list(weight_t.shape) != shape:
        fix = "One weight per step; see persample.rl.diagnostics.reward_to_go."
        received = f"shape {list(weight_t.shape)}" if isinstance(weight_t, Tensor) else type(weight_t).__name__
        raise ArgumentError.about(argument, expected=f"shape {shape}", received=received, fix=fix)
    return unpadded(episodes.mask_t, weight_t)


def _checked(episodes: Episodes, *, several: bool = False) -> Episodes:
    """Check the fields of episodes; if several are needed, also their number, and that padding comes last."""
    missing = [field for field in Episodes._fields if not hasattr(episodes, field)]
    if missing:
        fix = f"Pass Episodes({', '.join(Episodes._fields)}), as collect_episodes returns it."
        raise ArgumentError.about("episodes", expected="Episodes", received=type(episodes).__name__, fix=fix)
    like = episodes.r_t
    for field in ("r_t", "discount_t", "mask_t"):
        value = getattr(episodes, field)
        if not isinstance(value, Tensor) or value.ndim != 2 or value.shape != like.shape:
            expected = "a tensor of shape [E, T]" + (f", {list(like.shape)} as of r_t" if field != "r_t" else "")
            received = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            fix = "Episodes are rows; where all steps are real, mask_t is torch.ones_like(r_t, dtype=torch.bool)."
            raise ArgumentError.about(f"episodes.{field}", expected=expected, received=received, fix=fix)
    mask_t = episodes.mask_t.bool()
    if several and not bool(mask_t[:, :1].all() & (mask_t[:, 1:] <= mask_t[:, :-1]).all()):
        expected, received = "real steps first, and padding after them, in every row", "others"
        fix = "Is time the first axis? Transpose all fields: x.transpose(0, 1)."
        raise ArgumentError.about("episodes.mask_t", expected=expected, received=received, fix=fix)
    if several and len(mask_t) < 2:
        fix = "One episode has no spread: collect more."
        raise ArgumentError.about("episodes", expected="2 or more", received=f"{len(mask_t)}", fix=fix)
    return Episodes(episodes.obs_t, episodes.a_t, like, episodes.discount_t, mask_t)


def _returns(episodes: Episodes) -> Tensor:
    """Return Gₜ without bootstrap, ``[E, T]``, 0 at padding."""
    return discounted_returns(episodes.r_t, episodes.discount_t, 0.0, mask_t=episodes.mask_t, time_dim=1)
