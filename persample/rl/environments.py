"""Vectorized environments by name."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import error

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
