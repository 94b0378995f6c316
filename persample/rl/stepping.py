"""One step of all environments under a policy, the same for each of gymnasium's autoreset modes.

The modes differ in the place of an episode's last and first observation (gymnasium 1.4,
``vector/sync_vector_env.py``): NEXT_STEP returns the last one, and the following step is a reset without valid action
or reward; SAME_STEP returns the first one, and the last one in ``infos["final_obs"]``; DISABLED returns the
last one and waits for ``reset(options={"reset_mask": …})``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from torch import Tensor

from persample.errors import ArgumentError
from persample.rl.check import Envs, Policy, autoreset_mode, checked_actions


class State(NamedTuple):
    """The state of a rollout: the policy's next observations, and the rows whose next step is only a reset."""

    obs: NDArray[Any]
    resets: NDArray[np.bool_]


class Step(NamedTuple):
    """One step of all environments, one row each; rows that are not ``real_t`` are invalid."""

    obs_tm1: NDArray[Any]
    a_tm1: NDArray[Any]
    r_t: NDArray[np.float32]
    discount_t: NDArray[np.float32]
    obs_t: NDArray[Any]
    done_t: NDArray[np.bool_]
    real_t: NDArray[np.bool_]


def start(envs: Envs, seed: int) -> tuple[State, torch.Generator]:
    """Reset the environments; return the first state and the policy's generator, seeded."""
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
    """Act once in every environment; return the next state, with finished environments reset, and the step."""
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


def _with_final(obs_t: NDArray[Any], done: NDArray[np.bool_], infos: dict[str, Any]) -> NDArray[Any]:
    if done.any() and "final_obs" not in infos:
        fix = "Without it the end of an episode is lost: use autoreset_mode='NextStep'."
        expected, received = "infos['final_obs'] at the end of an episode (SameStep autoreset)", f"keys {sorted(infos)}"
        raise ArgumentError.about("envs", expected=expected, received=received, fix=fix)
    obs_t = obs_t.copy()
    for row in np.flatnonzero(done):
        obs_t[row] = infos["final_obs"][row]
    return obs_t


def _copy(envs: Envs, observed: Any) -> NDArray[Any]:
    # Always copy: environments may return a buffer that their next step overwrites.
    kind = envs.single_observation_space.dtype
    if np.issubdtype(kind, np.floating):
        return np.array(observed, np.float32)
    return np.array(observed, np.uint8 if kind == np.uint8 else np.int64)
