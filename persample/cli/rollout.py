"""The data of the comparison: a policy network acts in a gymnasium environment, as the checked arguments say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gymnasium.vector import VectorEnv
from torch import nn

from persample import inputs, rl
from persample.errors import ArgumentError
from persample.inputs import Engine
from persample.rl.policies import Features, count_actions, mlp

# Episodes are truncated here: some environments have no time limit, and the longest episode sets the padded length.
MAX_STEPS = 1000


@dataclass(frozen=True)
class Settings:
    """The arguments of ``persample compare``, checked: an ``ArgumentError`` names the option."""

    env: str = "CartPole-v1"
    episodes: int = 64
    hidden: int = 64
    engine: Engine = "eager"
    seed: int = 0
    rounds: int = 5

    def __post_init__(self) -> None:
        for name in ("episodes", "hidden", "rounds"):
            if (count := getattr(self, name)) < 1:
                expected, received = "a positive integer", str(count)
                raise ArgumentError.about(f"--{name}", expected=expected, received=received, fix="Use 1 or more.")
        if not 0 <= self.seed < 2**63:
            fix = "Any other number will do."
            raise ArgumentError.about("--seed", expected="0 … 2⁶³ − 1", received=str(self.seed), fix=fix)
        inputs.check_options(engine=self.engine, randomness="error", chunk_size=None)

    @property
    def transitions(self) -> int:
        """Number of transitions for TD(0)."""
        return 8 * self.episodes


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
    """Collect data with a new policy; ``progress`` gets "transitions" or "episodes", and their number."""
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
    """Make up to 8 environments that the comparison can use, or raise an ``ArgumentError``."""
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
