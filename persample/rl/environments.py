"""Vectorized environments by name, and an environment with known values."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import error, spaces

from persample.errors import ArgumentError
from persample.rl.check import Envs, check_count


def make_envs(env_id: str, num_envs: int = 8, **kwargs: Any) -> Envs:
    """Make copies of an environment that are stepped together in this process.

    Args:
        env_id: a registered environment, such as "CartPole-v1" ("module:Name-v0" imports the module first).
        num_envs: number of copies N.
        kwargs: further arguments of ``gymnasium.make_vec``: ``max_episode_steps=100``, ``wrappers=[…]``,
            ``vector_kwargs={"autoreset_mode": "SameStep"}``, or arguments of the environment itself.

    Returns:
        The environments, a ``gymnasium.vector.SyncVectorEnv``.

    Raises:
        ArgumentError: if the environment is unknown or lacks a dependency, or ``num_envs`` is less than 1.

    Examples:
        >>> make_envs("CartPole-v1", 2)
        SyncVectorEnv(CartPole-v1, num_envs=2)
    """
    check_count("num_envs", num_envs)
    try:
        return gymnasium.make_vec(env_id, int(num_envs), vectorization_mode="sync", **kwargs)
    except (error.DependencyNotInstalled, ImportError) as cause:
        expected, fix = "an environment whose dependencies are installed", f"gymnasium says: {cause}"
        raise ArgumentError.about("env_id", expected=expected, received=repr(env_id), fix=fix) from cause
    except error.Error as cause:
        expected, fix = "the id of a registered environment", f"gymnasium says: {cause}"
        raise ArgumentError.about("env_id", expected=expected, received=repr(env_id), fix=fix) from cause


class RandomWalk(gymnasium.Env[Any, Any]):
    """A row of states between two terminal states; the reward is 1 for reaching the right one, otherwise 0.

    Action 0 moves left, action 1 right. Under the uniformly random policy and γ = 1, the values of the n states are
    1/(n+1), …, n/(n+1). Registered with gymnasium as ``persample/RandomWalk-v0``.

    Source: Sutton and Barto, "Reinforcement Learning" (2nd edition, 2018), example 6.2.

    Args:
        states: number of states n between the terminal states; episodes begin in the middle.

    Raises:
        ArgumentError: if ``states`` is less than 1.

    Examples:
        >>> env = gymnasium.make("persample/RandomWalk-v0", states=1)
        >>> env.reset(seed=0), env.step(1)
        ((1, {}), (2, 1.0, True, False, {}))
    """

    def __init__(self, states: int = 5) -> None:
        if states < 1:
            raise ArgumentError.about("states", expected="a positive int", received=repr(states), fix="Use 1 or more.")
        self.observation_space = spaces.Discrete(states + 2)
        self.action_space = spaces.Discrete(2)
        end = states + 1
        # As in gymnasium's toy environments: P[s][a] lists (probability, next state, reward, terminated).
        self.P = {s: {a: [self._step(s, a, end)] for a in (0, 1)} for s in range(end + 1)}
        self.middle = self.state = (end + 1) // 2

    @staticmethod
    def _step(s: int, a: int, end: int) -> tuple[float, int, float, bool]:
        if s in {0, end}:
            return 1.0, s, 0.0, True
        s_t = s + (1 if a else -1)
        return 1.0, s_t, float(s_t == end), s_t in {0, end}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Begin an episode in the middle.

        Args:
            seed: unused, as the environment is deterministic.
            options: none.

        Returns:
            The state, and an empty info.
        """
        super().reset(seed=seed, options=options)
        self.state = self.middle
        return self.state, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Move left or right.

        Args:
            action: 0 or 1.

        Returns:
            The state, the reward, whether the episode terminated, False, and an empty info.
        """
        _, self.state, reward, terminated = self.P[self.state][int(action)][0]
        return self.state, reward, terminated, False, {}


gymnasium.register(
    "persample/RandomWalk-v0", entry_point="persample.rl.environments:RandomWalk", max_episode_steps=1000
)
