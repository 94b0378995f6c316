"""Batches of single transitions, for temporal-difference losses."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from persample.rl.check import Envs, Network, Policy, Progress, check_count, check_rollout
from persample.rl.policies import as_policy
from persample.rl.stepping import advance, start


class Transitions(NamedTuple):
    """N transitions (s, a, r, γ, s′), one per row.

    Attributes:
        obs_tm1: observations in which the actions were taken, ``[N, *obs]``: float32 for floating Box spaces, uint8
            for images, else int64.
        a_tm1: actions, ``[N, *act]``, int64 (discrete) or float32 (continuous).
        r_t: rewards, ``[N]``, float32.
        discount_t: γ, or 0 where the environment terminated, ``[N]``, float32. The last transition of a
            truncated episode (a time limit) keeps γ and bootstraps.
        obs_t: the next observations, ``[N, *obs]``: at the end of an episode its last observation, not the first one
            of the next episode.
    """

    obs_tm1: Tensor
    a_tm1: Tensor
    r_t: Tensor
    discount_t: Tensor
    obs_t: Tensor


def collect_transitions(
    envs: Envs,
    policy: Policy | Network,
    num_transitions: int,
    *,
    discount: float = 0.99,
    seed: int,
    progress: Progress | None = None,
) -> Transitions:
    """Collect a given number of transitions of a policy, in every autoreset mode of the environments.

    The environments are reset once and stepped together; a new episode follows each finished one. Rows are ordered by
    step, then by environment; of the last step, only the first environments are taken. Steps that are resets (the step
    after the end of an episode under NEXT_STEP autoreset) are dropped.

    Args:
        envs: N environments with array observations and actions (see ``make_envs``).
        policy: a function ``(observations [N, *obs], generator) → actions [N, *act]``; or a network, any callable
            of observations alone: its logits, distribution, or pair of these and values is sampled from as by
            ``categorical_policy``, in an action space of real numbers (Box) as by ``gaussian_policy``.
        num_transitions: number of transitions.
        discount: γ, from 0 to 1.
        seed: the seed of environments and policy: equal seeds give equal batches, bit for bit. The global generators
            are neither used nor changed.
        progress: called with the number of new transitions after every step.

    Returns:
        The transitions, on the CPU.

    Raises:
        ArgumentError: if an argument is invalid; the message names it and the reason.

    Examples:
        >>> from persample.rl import make_envs
        >>> policy = torch.nn.Linear(4, 2)
        >>> batch = collect_transitions(make_envs("CartPole-v1"), policy, 100, seed=0)
        >>> batch.obs_tm1.shape, batch.a_tm1.shape, batch.discount_t.shape
        (torch.Size([100, 4]), torch.Size([100]), torch.Size([100]))
    """
    check_rollout(envs, discount, seed)
    check_count("num_transitions", num_transitions)
    act = as_policy(policy, envs.single_action_space)
    state, generator = start(envs, seed)
    parts, missing = [], int(num_transitions)
    while missing:
        state, step = advance(envs, act, generator, state, discount)
        rows = np.flatnonzero(step.real_t)[:missing]
        parts.append([field[rows] for field in (step.obs_tm1, step.a_tm1, step.r_t, step.discount_t, step.obs_t)])
        missing -= len(rows)
        if progress is not None and len(rows):
            progress(len(rows))
    return Transitions(*(torch.from_numpy(np.concatenate(field)) for field in zip(*parts, strict=True)))
