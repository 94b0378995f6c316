"""Checks of rollouts: arguments, environments and actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from persample.errors import ArgumentError

Envs = VectorEnv[Any, Any, Any]
Policy = Callable[[Tensor, torch.Generator], Tensor]
Network = Callable[[Tensor], Any]
Progress = Callable[[int], object]

_ARRAY_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def check_count(argument: str, count: int) -> None:
    """Reject a count that is no positive int."""
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
        raise ArgumentError.about(argument, expected="a positive int", received=repr(count), fix="Use 1 or more.")


def check_rollout(envs: object, discount: float, seed: int) -> None:
    """Check the arguments that all rollouts share: environments, discount, seed."""
    if not isinstance(envs, VectorEnv):
        fix = "Use persample.rl.make_envs, or SyncVectorEnv([lambda: env]) for one environment."
        raise ArgumentError.about("envs", expected="a gymnasium VectorEnv", received=type(envs).__name__, fix=fix)
    if not 0 <= discount <= 1:
        fix = "Use 1.0 for undiscounted rewards."
        raise ArgumentError.about("discount", expected="a number from 0 to 1", received=repr(discount), fix=fix)
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        fix = "Pass any int; the same one gives the same batch."
        raise ArgumentError.about("seed", expected="a non-negative int", received=repr(seed), fix=fix)
    _check_autoreset(envs)
    _check_space(
        envs.single_observation_space, "observation", "Flatten it: make_envs(…, wrappers=[FlattenObservation])"
    )
    _check_space(envs.single_action_space, "action", "Wrap the environment in a TransformAction")


def _check_space(space: spaces.Space[Any], kind: str, fix: str) -> None:
    if not isinstance(space, _ARRAY_SPACES):
        expected = f"a single array as {kind} (Box, Discrete, MultiDiscrete or MultiBinary)"
        raise ArgumentError.about("envs", expected=expected, received=str(space), fix=f"{fix} (gymnasium.wrappers).")


def _check_autoreset(envs: Envs) -> None:
    # AsyncVectorEnv's workers (gymnasium 1.1, 1.4) forget to clear a pending autoreset when reset without shared
    # memory: the first step after our seeded reset would be another reset, which no flag tells from a step.
    if autoreset_mode(envs) is AutoresetMode.NEXT_STEP and getattr(envs.unwrapped, "shared_memory", True) is False:
        fix = "Use shared_memory=True or autoreset_mode='SameStep': with this pair gymnasium resets one step too late."
        received = "NextStep autoreset with shared_memory=False"
        raise ArgumentError.about("envs", expected="environments that reset when told to", received=received, fix=fix)


def autoreset_mode(envs: Envs) -> AutoresetMode:
    """Return the autoreset mode of environments; reject those that do not name theirs."""
    # In gymnasium 1.1 all environments of a class share their metadata, which names the mode of the newest;
    # the attribute of SyncVectorEnv and AsyncVectorEnv belongs to each environment.
    mode = getattr(envs.unwrapped, "autoreset_mode", envs.metadata.get("autoreset_mode"))
    if mode not in [*AutoresetMode, *(known.value for known in AutoresetMode)]:
        fix = "It says which steps are resets: let the environments set it to a gymnasium.vector.AutoresetMode."
        raise ArgumentError.about("envs", expected="metadata['autoreset_mode']", received=repr(mode), fix=fix)
    return AutoresetMode(mode)


def checked_actions(envs: Envs, actions: Tensor) -> NDArray[Any]:
    """Check a policy's actions against the action space, and copy them to NumPy.

    Returns:
        The actions, ``[N, *act]``: float32 for floating Box spaces, else int64.

    Raises:
        ArgumentError: if shape, dtype or range do not fit the action space.
    """
    space = envs.action_space
    expected = f"actions of shape {space.shape} from {envs.single_action_space}"
    if not isinstance(actions, Tensor) or tuple(actions.shape) != space.shape:
        received = f"shape {tuple(actions.shape)}" if isinstance(actions, Tensor) else type(actions).__name__
        fix = (
            "It is called as policy(observations, generator) and returns a tensor with one action per environment. "
            "What returns logits or a distribution takes observations alone."
        )
        raise ArgumentError.about("policy", expected=expected, received=received, fix=fix)
    continuous = np.issubdtype(space.dtype, np.floating)
    chosen = actions.detach().to("cpu", torch.float32 if continuous else torch.int64).numpy().copy()
    # Environments handle continuous actions out of bounds (many clip them); a discrete one is a mistake.
    if not continuous and (actions.is_floating_point() or not space.contains(chosen.astype(space.dtype))):
        received = f"{actions.dtype} actions {actions.tolist()}"
        fix = "Return integers of this range: the network's number of outputs must be the number of actions."
        raise ArgumentError.about("policy", expected=expected, received=received, fix=fix)
    return chosen
