"""The data of the comparison: a policy network acts in a gymnasium environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from torch import Tensor, nn

from persample import rl
from persample.cli.settings import Settings
from persample.errors import ArgumentError

# Longer episodes are cut: some environments have no time limit, and a padded batch is as long as its longest episode.
MAX_STEPS = 1000


@dataclass(frozen=True)
class Rollout:
    """Networks, and what happened when the policy acted.

    Args:
        policy: from observations to logits of the actions.
        value: from observations to one value.
        transitions: for TD(0).
        episodes: for REINFORCE.
    """

    policy: nn.Sequential
    value: nn.Sequential
    transitions: rl.Transitions
    episodes: rl.Episodes


class Features(nn.Module):
    """Turns observations into vectors: states of a Discrete space one-hot, those of a flat Box as float32.

    Args:
        space: the space of one observation.

    Raises:
        ArgumentError: if it is neither.
    """

    def __init__(self, space: spaces.Space[object]) -> None:
        super().__init__()
        self.start = 0
        self.one_hot = isinstance(space, spaces.Discrete)
        if isinstance(space, spaces.Discrete):
            self.start, self.size = int(space.start), int(space.n)
        elif isinstance(space, spaces.Box) and len(space.shape) == 1:
            self.size = space.shape[0]
        else:
            received = f"{type(space).__name__} of shape {space.shape}" if space.shape else type(space).__name__
            raise ArgumentError(f"--env: needs a flat Box or a Discrete observation space, received {received}")

    def forward(self, observations: Tensor) -> Tensor:
        """Encode observations.

        Args:
            observations: ``[*, d]`` of a Box, ``[*]`` of a Discrete space.

        Returns:
            The features, ``[*, size]``, float32.
        """
        if self.one_hot:
            # F.one_hot looks at values, which vmap cannot batch.
            states = torch.arange(self.start, self.start + self.size, device=observations.device)
            return (observations[..., None] == states).float()
        return observations.float()


def roll_out(settings: Settings, open_envs: VectorEnv, progress: Callable[[str, int], object]) -> Rollout:
    """Let a freshly initialized policy act.

    Args:
        settings: what to compare.
        open_envs: from ``make_envs``.
        progress: called with "transitions" or "episodes" and the number of new ones.

    Returns:
        The networks and the batches.
    """
    space = open_envs.single_observation_space
    actions = int(cast("spaces.Discrete", open_envs.single_action_space).n)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        policy, value = _mlp(space, settings.hidden, actions), _mlp(space, settings.hidden, 1)
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
        settings: what to compare.

    Returns:
        Up to 8 environments.

    Raises:
        ArgumentError: if there is none of this name, or its spaces do not fit.
    """
    try:
        envs = rl.make_envs(settings.env, min(8, settings.episodes))
    except ArgumentError as error:
        raise ArgumentError(f"--env: {str(error).removeprefix('env_id: ')}") from error
    try:
        _check_actions(envs.single_action_space)
        Features(envs.single_observation_space)
    except ArgumentError:
        envs.close()
        raise
    return envs


def _check_actions(space: spaces.Space[object]) -> None:
    if not isinstance(space, spaces.Discrete):
        continuous = " (continuous actions)" if isinstance(space, spaces.Box) else ""
        raise ArgumentError(f"--env: needs a Discrete action space, received {type(space).__name__}{continuous}")
    if space.start != 0:
        raise ArgumentError(f"--env: needs a Discrete action space that starts at 0, received {space}")


def _mlp(space: spaces.Space[object], hidden: int, outputs: int) -> nn.Sequential:
    features = Features(space)
    return nn.Sequential(
        features,
        nn.Linear(features.size, hidden),
        nn.Tanh(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, outputs),
    )
