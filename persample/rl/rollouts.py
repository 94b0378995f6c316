"""Batches of rollouts: single transitions for temporal-difference losses, and whole episodes, padded to one length."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from persample.rl.environments import (
    Array,
    Envs,
    Network,
    Policy,
    Step,
    advance,
    check_number,
    check_rollout,
    restart,
    start,
)
from persample.rl.policies import as_policy

# One step of one episode: observation, action, reward, discount.
Row = tuple[Array, Array, np.float32, np.float32]


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
    envs: Envs, policy: Policy | Network, num_transitions: int, *, discount: float = 0.99, seed: int
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
    check_number("num_transitions", num_transitions, 1)
    act = as_policy(policy, envs.single_action_space)
    state, generator = start(envs, seed)
    parts, missing = [], int(num_transitions)
    while missing:
        state, step = advance(envs, act, generator, state, discount)
        rows = np.flatnonzero(step.real_t)[:missing]
        parts.append([field[rows] for field in (step.obs_tm1, step.a_tm1, step.r_t, step.discount_t, step.obs_t)])
        missing -= len(rows)
    return Transitions(*(torch.from_numpy(np.concatenate(field)) for field in zip(*parts, strict=True)))


class Episodes(NamedTuple):
    """E episodes, one per row, padded with zeros to the T steps of the longest.

    Attributes:
        obs_t: observations in which the actions were taken, ``[E, T, *obs]``: float32 for floating Box spaces, uint8
            for images, else int64.
        a_t: actions, ``[E, T, *act]``, int64 (discrete) or float32 (continuous).
        r_t: rewards received after the actions, ``[E, T]``, float32.
        discount_t: γ, or 0 where the environment terminated after the action, ``[E, T]``, float32. The last step of a
            truncated episode keeps γ.
        mask_t: True at real steps, False at padding, ``[E, T]``, bool.
    """

    obs_t: Tensor
    a_t: Tensor
    r_t: Tensor
    discount_t: Tensor
    mask_t: Tensor


def collect_episodes(
    envs: Envs,
    policy: Policy | Network,
    num_episodes: int,
    *,
    discount: float = 0.99,
    seed: int,
    max_steps: int | None = None,
) -> Episodes:
    """Collect whole episodes of a policy, with the distribution of a loop over a single environment.

    Row e is episode e // N of environment e % N: the first E episodes to finish would favour short episodes. An
    environment that has finished its episodes is stepped along without being recorded. Unfinished episodes are not
    returned.

    Args:
        envs: N environments with array observations and actions (see ``make_envs``).
        policy: a function ``(observations [N, *obs], generator) → actions [N, *act]``; or a network, any callable
            of observations alone: its logits, distribution, or pair of these and values is sampled from as by
            ``categorical_policy``, in an action space of real numbers (Box) as by ``gaussian_policy``.
        num_episodes: number of episodes E.
        discount: γ, from 0 to 1.
        seed: the seed of environments and policy: equal seeds give equal batches, bit for bit. The global generators
            are neither used nor changed.
        max_steps: the number of steps after which episodes are truncated; without it, an episode that never ends is
            stepped forever.

    Returns:
        The episodes, on the CPU.

    Raises:
        ArgumentError: if an argument is invalid; the message names it and the reason.

    Examples:
        >>> from persample.rl import make_envs
        >>> policy = torch.nn.Linear(4, 2)
        >>> batch = collect_episodes(make_envs("CartPole-v1"), policy, 5, seed=0, max_steps=20)
        >>> batch.obs_t.shape[0], batch.mask_t.shape == batch.r_t.shape, bool(batch.mask_t[:, 0].all())
        (5, True, True)
    """
    check_rollout(envs, discount, seed)
    check_number("num_episodes", num_episodes, 1)
    if max_steps is not None:
        check_number("max_steps", max_steps, 1)
    act = as_policy(policy, envs.single_action_space)
    state, generator = start(envs, seed)
    shares = [len(range(i, num_episodes, envs.num_envs)) for i in range(envs.num_envs)]
    recorded: list[list[list[Row]]] = [[[]] for _ in shares]
    missing = int(num_episodes)
    while missing:
        state, step = advance(envs, act, generator, state, discount)
        ended = _record(recorded, shares, step, max_steps)
        if (cut := ended & ~step.done_t).any():
            state = restart(envs, state, cut)
        missing -= int(ended.sum())
    return _pad([recorded[e % envs.num_envs][e // envs.num_envs] for e in range(num_episodes)])


def _record(recorded: list[list[list[Row]]], shares: list[int], step: Step, max_steps: int | None) -> NDArray[np.bool_]:
    """Append a step to the running episodes (the last of each list)."""
    ended = np.zeros_like(step.done_t)
    for i, (episodes, share) in enumerate(zip(recorded, shares, strict=True)):
        if step.real_t[i] and len(episodes) <= share:
            episodes[-1].append((step.obs_tm1[i], step.a_tm1[i], step.r_t[i], step.discount_t[i]))
            ended[i] = step.done_t[i] or len(episodes[-1]) == max_steps
            if ended[i]:
                episodes.append([])
    return ended


def _pad(episodes: list[list[Row]]) -> Episodes:
    columns = zip(*(zip(*episode, strict=True) for episode in episodes), strict=True)  # of obs_t, a_t, r_t, discount_t
    tensors = ([torch.from_numpy(np.stack(x)) for x in column] for column in columns)
    obs_t, a_t, r_t, discount_t = (pad_sequence(column, batch_first=True) for column in tensors)
    lengths = torch.tensor(list(map(len, episodes)))
    return Episodes(obs_t, a_t, r_t, discount_t, torch.arange(int(lengths.max())) < lengths[:, None])
