"""Vectorized environments by name, and one with known values; checks of rollouts; one step of all environments.

A step is the same for each of gymnasium's autoreset modes, which differ in the place of an episode's last and first
observation (gymnasium 1.4, ``vector/sync_vector_env.py``): NEXT_STEP returns the last one, and the following step is a
reset without valid action or reward; SAME_STEP returns the first one, and the last one in ``infos["final_obs"]``;
DISABLED returns the last one and waits for ``reset(options={"reset_mask": …})``.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import error, spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from persample.errors import ArgumentError
from persample.utils.trees import Leaf, Tree

Array = NDArray[np.generic]
Envs = VectorEnv[Array, Array, Array]
Space = spaces.Space[Array]
Infos = dict[str, Leaf]
Policy = Callable[[Tensor, torch.Generator], Tensor]
Network = Callable[[Tensor], Tree]

_ARRAY_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def check_number(name: str, value: float, least: float, most: float = math.inf, fix: str = "") -> None:
    """Reject a number out of its range; a least value of type int asks for an int."""
    whole = isinstance(least, int)
    kind = numbers.Integral if whole else numbers.Real
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
        expected = f"{'an int' if whole else 'a number'} from {least:g} to {most:g}"
        if whole and most == math.inf:
            expected = "a positive int" if least else "a non-negative int"
        fix = fix or ("Choose one in that range." if most < math.inf else f"Use {least:g} or more.")
        raise ArgumentError.about(name, expected=expected, received=repr(value), fix=fix)


def check_rollout(envs: object, discount: float, seed: int) -> None:
    """Check the arguments that all rollouts share: environments, discount, seed."""
    if not isinstance(envs, VectorEnv):
        fix = "Use persample.rl.make_envs, or SyncVectorEnv([lambda: env]) for one environment."
        raise ArgumentError.about("envs", expected="a gymnasium VectorEnv", received=type(envs).__name__, fix=fix)
    check_number("discount", discount, 0.0, 1.0, "Use 1.0 for undiscounted rewards.")
    check_number("seed", seed, 0, fix="Pass any int; the same one gives the same batch.")
    _check_autoreset(envs)
    for space, kind, fix in (
        (envs.single_observation_space, "observation", "Flatten it: make_envs(…, wrappers=[FlattenObservation])"),
        (envs.single_action_space, "action", "Wrap the environment in a TransformAction"),
    ):
        if not isinstance(space, _ARRAY_SPACES):
            expected, received = f"a single array as {kind} (Box, Discrete, MultiDiscrete or MultiBinary)", str(space)
            raise ArgumentError.about("envs", expected=expected, received=received, fix=f"{fix} (gymnasium.wrappers).")


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


def checked_actions(envs: Envs, actions: Tensor) -> Array:
    """Check a policy's actions against the action space, and copy them to NumPy."""
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


def make_envs(env_id: str, num_envs: int = 8, **kwargs: Leaf) -> Envs:
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
    check_number("num_envs", num_envs, 1)
    try:
        return gymnasium.make_vec(env_id, int(num_envs), vectorization_mode="sync", **kwargs)
    except (error.Error, ImportError) as cause:
        known = isinstance(cause, error.DependencyNotInstalled | ImportError)
        expected = "an environment whose dependencies are installed" if known else "the id of a registered environment"
        fix = f"gymnasium says: {cause}"
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
        check_number("states", states, 1)
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

    def reset(self, *, seed: int | None = None, options: Infos | None = None) -> tuple[int, Infos]:
        """Begin an episode in the middle; return the state and an empty info. Seed and options have no effect."""
        super().reset(seed=seed, options=options)
        self.state = self.middle
        return self.state, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, Infos]:
        """Move left (0) or right (1); return the state, the reward, whether it terminated, False, and an empty info."""
        _, self.state, reward, terminated = self.P[self.state][int(action)][0]
        return self.state, reward, terminated, False, {}


gymnasium.register(
    "persample/RandomWalk-v0", entry_point="persample.rl.environments:RandomWalk", max_episode_steps=1000
)


class State(NamedTuple):
    """The state of a rollout: the policy's next observations, and the rows whose next step is only a reset."""

    obs: Array
    resets: NDArray[np.bool_]


class Step(NamedTuple):
    """One step of all environments, one row each; rows that are not ``real_t`` are invalid."""

    obs_tm1: Array
    a_tm1: Array
    r_t: NDArray[np.float32]
    discount_t: NDArray[np.float32]
    obs_t: Array
    done_t: NDArray[np.bool_]
    real_t: NDArray[np.bool_]


def start(envs: Envs, seed: int) -> tuple[State, torch.Generator]:
    """Return the first state of environments that are reset, and the policy's generator, seeded."""
    envs_seed, policy_seed = seeds(seed)
    observed, _ = envs.reset(seed=envs_seed)
    return State(_copy(envs, observed), np.zeros(envs.num_envs, bool)), torch.Generator().manual_seed(policy_seed)


def seeds(seed: int) -> tuple[int, int]:
    """Return independent seeds for the environments (31 bits) and the policy.

    Environment i is seeded with the first seed plus i: without this derivation, the batches of seeds 0 and 1 would
    share all but one of their environments.
    """
    envs_seed, policy_seed = np.random.SeedSequence(int(seed)).generate_state(2)
    return int(envs_seed >> 1), int(policy_seed)


def advance(
    envs: Envs, policy: Policy, generator: torch.Generator, state: State, discount: float
) -> tuple[State, Step]:
    """Return the state after one action in each environment, with finished environments reset, and the step."""
    with torch.no_grad():
        a_tm1 = checked_actions(envs, _acted(policy, torch.tensor(state.obs), generator))
    observed, r_t, terminated, truncated, infos = envs.step(a_tm1.astype(envs.action_space.dtype))
    obs_t, done = _copy(envs, observed), np.asarray(terminated) | np.asarray(truncated)
    discount_t = np.where(terminated, 0, discount).astype(np.float32)
    mode, following = autoreset_mode(envs), State(obs_t, np.zeros_like(done))
    if mode is AutoresetMode.NEXT_STEP:
        following = State(obs_t, done)
    elif mode is AutoresetMode.SAME_STEP:
        obs_t = _with_final(obs_t, done, infos)
    elif done.any():
        following = restart(envs, following, done)
    return following, Step(state.obs, a_tm1, np.array(r_t, np.float32), discount_t, obs_t, done, ~state.resets)


def _acted(policy: Policy, obs: Tensor, generator: torch.Generator) -> Tensor:
    try:
        return policy(obs, generator)
    except RuntimeError as error:
        if "dtype" in str(error) or "scalar type" in str(error):
            fix = "Pass a function that converts them, such as lambda o: network(o.double())."
            error.args = (f"{error}\nObservations are of {obs.dtype}. {fix}",)
        raise


def restart(envs: Envs, state: State, mask: NDArray[np.bool_]) -> State:
    """Return the state after new episodes have begun in some environments, given by a mask ``[N]``."""
    observed, _ = envs.reset(options={"reset_mask": mask.copy()})
    obs = _copy(envs, observed)
    if not np.array_equal(obs[~mask], state.obs[~mask], equal_nan=True):
        fix = "Leave out max_steps, and limit the episodes in the environments (max_episode_steps=…)."
        received = f"{envs}, where others changed as well"
        expected = "environments that reset only those in options['reset_mask']"
        raise ArgumentError.about("envs", expected=expected, received=received, fix=fix)
    return State(obs, state.resets & ~mask)


def _with_final(obs_t: Array, done: NDArray[np.bool_], infos: Infos) -> Array:
    if done.any() and "final_obs" not in infos:
        fix = "Without it the end of an episode is lost: use autoreset_mode='NextStep'."
        expected, received = "infos['final_obs'] at the end of an episode (SameStep autoreset)", f"keys {sorted(infos)}"
        raise ArgumentError.about("envs", expected=expected, received=received, fix=fix)
    obs_t = obs_t.copy()
    for row in np.flatnonzero(done):
        obs_t[row] = infos["final_obs"][row]
    return obs_t


def _copy(envs: Envs, observed: object) -> Array:
    # Always copy: environments may return a buffer that their next step overwrites.
    kind = envs.single_observation_space.dtype
    if np.issubdtype(kind, np.floating):
        return np.array(observed, np.float32)
    return np.array(observed, np.uint8 if kind == np.uint8 else np.int64)
