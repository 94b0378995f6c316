"""Norms, cosines and noise scale of the gradients of a batch of episodes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from persample.inputs import Engine
from persample.per_sample import per_sample_grads
from persample.reductions import CosineSimilarity, NoiseScale, NoiseScaleEstimate, Norm
from persample.rl.diagnostics.scores import LogProbFn, check_enough, score_batch, score_fn
from persample.rl.diagnostics.weights import reward_to_go
from persample.rl.episodes import Episodes


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
    params: Any,
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
