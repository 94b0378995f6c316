"""Evaluation of a trained policy on new episodes."""

from __future__ import annotations

from torch import nn

from persample.rl.environments import make_envs
from persample.rl.episodes import collect_episodes
from persample.rl.networks import sampling


def evaluate(network: nn.Module, env: str, num_episodes: int = 100, *, seed: int) -> list[float]:
    """Play episodes with actions sampled from a policy.

    Args:
        network: its part ``policy`` maps observations to logits, or to means and deviations, as in ``ActorCritic``.
        env: id of the environment.
        num_episodes: number of episodes E.
        seed: the seed of environments and actions.

    Returns:
        Undiscounted returns, ``E`` of them.

    Examples:
        >>> from persample.rl.networks import ActorCritic
        >>> envs = make_envs("CartPole-v1", 1)
        >>> network = ActorCritic(envs.single_observation_space, 8, 2)
        >>> min(evaluate(network, "CartPole-v1", 3, seed=0)) > 0
        True
    """
    envs = make_envs(env, min(16, num_episodes))
    try:
        episodes = collect_episodes(envs, sampling(network.get_submodule("policy")), num_episodes, seed=seed)
    finally:
        envs.close()
    returns: list[float] = episodes.r_t.sum(1).tolist()
    return returns
