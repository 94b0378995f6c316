"""The data of the comparison: a policy network acts in a gymnasium environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gymnasium.vector import VectorEnv
from torch import nn

from persample import rl
from persample.cli.settings import Settings
from persample.errors import ArgumentError
from persample.rl.networks import Features, count_actions, mlp

# Episodes are truncated here: some environments have no time limit, and the longest episode sets the padded length.
MAX_STEPS = 1000


@dataclass(frozen=True)
class Rollout:
    """Networks, and the data that the policy collected.

    Args:
        policy: a network from observations to logits of the actions.
        value: a network from observations to one value.
        transitions: the batch of TD(0).
        episodes: the batch of REINFORCE.
    """

    policy: nn.Sequential
    value: nn.Sequential
    transitions: rl.Transitions
    episodes: rl.Episodes


def roll_out(settings: Settings, open_envs: VectorEnv, progress: Callable[[str, int], object]) -> Rollout:
    """Collect data with a freshly initialized policy.

    Args:
        settings: the settings of the comparison.
        open_envs: the environments, from ``make_envs``.
        progress: called with "transitions" or "episodes", and the number of new ones.

    Returns:
        The networks and the batches.
    """
    space, actions = open_envs.single_observation_space, count_actions(open_envs.single_action_space)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        policy, value = mlp(space, settings.hidden, actions), mlp(space, settings.hidden, 1)
    act = rl.categorical_policy(policy)
    transitions = rl.collect_transitions(
        open_envs, act, settings.transitions, seed=settings.seed, progress=lambda new: progress("transitions", new)
    )
    episodes = rl.collect_episodes(
        open_envs,
        act,
        settings.episodes,
        seed=settings.seed + 1,
        max_steps=MAX_STEPS,
        progress=lambda new: progress("episodes", new),
    )
    return Rollout(policy, value, transitions, episodes)


def make_envs(settings: Settings) -> VectorEnv:
    """Make environments that the comparison can use.

    Args:
        settings: the settings of the comparison.

    Returns:
        Up to 8 environments.

    Raises:
        ArgumentError: if the environment is unknown, or its spaces are not supported.
    """
    try:
        envs = rl.make_envs(settings.env, min(8, settings.episodes))
    except ArgumentError as error:
        raise ArgumentError(f"--env: {str(error).removeprefix('env_id: ')}") from error
    try:
        count_actions(envs.single_action_space)
        Features(envs.single_observation_space)
    except ArgumentError as error:
        envs.close()
        raise ArgumentError(f"--{error}") from error
    return envs
