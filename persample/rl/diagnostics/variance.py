"""Gradients of episodes: their norms, cosines and noise scale, the variance of estimators, and the best baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.inputs import Engine
from persample.per_sample import per_sample_grads
from persample.reductions import CosineSimilarity, NoiseScale, NoiseScaleEstimate, Norm, SecondMoment
from persample.rl.diagnostics.scores import (
    LogProbFn,
    WeightedByAux,
    check_enough,
    leave_one_out,
    reward_to_go,
    score_batch,
    score_fn,
    total_reward,
)
from persample.rl.rollouts import Episodes
from persample.utils.trees import Tree, tree_map


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
    episodes = check_enough(episodes)
    weight_t = reward_to_go(episodes) if weight_t is None else weight_t
    batch = score_batch(episodes, weight_t, episodes.r_t[:, :0])
    wanted = (Norm(), CosineSimilarity(), NoiseScale())
    norms, cosines, noise = per_sample_grads(
        score_fn(log_prob_fn), params, batch, wanted, chunk_size=chunk_size, engine=engine
    )
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
        chunk_size: the number of episodes (times estimators) processed at a time.
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
    episodes = check_enough(episodes)
    if weights_t is None:
        baseline = reward_to_go(episodes, leave_one_out(episodes))
        plain = {"total reward": total_reward(episodes), "reward-to-go": reward_to_go(episodes)}
        weights_t = {**plain, "baseline": baseline}
    if not isinstance(weights_t, Mapping) or not weights_t:
        received = "an empty dict" if isinstance(weights_t, Mapping) else type(weights_t).__name__
        fix = "Pass {'name': weight_t}, or leave it out for the usual three."
        raise ArgumentError.about("weights_t", expected="a dict of weights by name", received=received, fix=fix)
    # The batch holds one copy of the episodes per estimator; aux tells which estimator a copy belongs to.
    members = torch.eye(len(weights_t), device=episodes.r_t.device)
    parts = [
        score_batch(episodes, weight_t, row.expand(len(episodes.mask_t), -1), f"weights_t[{name!r}]")
        for (name, weight_t), row in zip(weights_t.items(), members, strict=True)
    ]
    batch = tuple(torch.cat(columns) for columns in zip(*parts, strict=True))
    wanted = {name: WeightedByAux(NoiseScale(), k) for k, name in enumerate(weights_t)}
    return per_sample_grads(score_fn(log_prob_fn), params, batch, wanted, chunk_size=chunk_size, engine=engine)


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
        chunk_size: how many episodes are processed at a time.
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
    episodes = check_enough(episodes)
    reward = total_reward(episodes)[:, 0]
    above = reward - reward.min()  # weights are not negative, and a baseline moves with the reward
    batch = score_batch(episodes, torch.ones_like(episodes.r_t), above[:, None])
    wanted = (SecondMoment(), WeightedByAux(SecondMoment(), 0)) if per_param else Norm()
    found = per_sample_grads(score_fn(log_prob_fn), params, batch, wanted, chunk_size=chunk_size, engine=engine)
    if not per_param:
        squared = found.square()
        b = reward.min() + (squared * above).sum() / squared.sum()
        return torch.where(squared.sum() > 0, b, reward.mean())

    def ratio(plain: Tensor, weighted: Tensor) -> Tensor:
        known = (plain > 0) & (above.mean() > 0)
        return torch.where(known, reward.min() + above.mean() * weighted / plain, reward.mean()).to(plain.dtype)

    return tree_map(ratio, *found)
