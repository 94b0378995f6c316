"""Exact values of small environments with known transition tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.rl.environments import Envs

# gymnasium's toy environments: table[s][a] lists (probability, next state, reward, terminated).
Table = Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]


def transition_table(envs: Envs) -> Table | None:
    """Return the transition table, which gymnasium's toy environments and ``RandomWalk`` have as ``P``.

    Args:
        envs: N environments.

    Returns:
        The table of the first environment, or None if it has none.

    Examples:
        >>> from persample.rl import make_envs
        >>> transition_table(make_envs("FrozenLake-v1", 1, is_slippery=False))[14][2]
        [(1.0, 15, 1, True)]
    """
    first: object = getattr(envs.unwrapped, "envs", [None])[0]
    table: Table | None = getattr(getattr(first, "unwrapped", None), "P", None)
    return table


def exact_values(table: Table, probabilities: Tensor, discount: float) -> Tensor:
    """Solve (I − γ P_π) v = r_π for the values of a policy π.

    Args:
        table: ``table[s][a]`` lists (probability, next state, reward, terminated).
        probabilities: π(a|s), ``[S, A]``.
        discount: γ, from 0 to 1.

    Returns:
        v, ``[S]``, float64; 0 where every action terminates with reward 0.

    Raises:
        ArgumentError: if the system is singular: γ is 1 and an episode need not end.

    Examples:
        >>> from persample.rl import make_envs
        >>> table = transition_table(make_envs("persample/RandomWalk-v0", 1))
        >>> (6 * exact_values(table, torch.full((7, 2), 0.5), 1.0)).round()
        tensor([0., 1., 2., 3., 4., 5., 0.], dtype=torch.float64)
    """
    rewards, following = _model(table)
    pi = probabilities.double()
    system = torch.eye(len(table), dtype=torch.float64) - discount * torch.einsum("sa,sat->st", pi, following)
    values, singular = torch.linalg.solve_ex(system, (pi * rewards).sum(1))
    if singular.item() or torch.linalg.cond(system) > 1e12:
        fix = "Use a smaller discount: under this policy an episode can go on forever."
        raise ArgumentError.about("discount", expected="values that exist", received=f"{discount}", fix=fix)
    return values


def optimal_actions(table: Table, discount: float) -> Tensor:
    """Find the best action of every state by value iteration, until no value moves by more than 1e-12.

    Args:
        table: ``table[s][a]`` lists (probability, next state, reward, terminated).
        discount: γ, from 0 to 1.

    Returns:
        One action per state, ``[S]``, int64; the first of tied actions.

    Examples:
        >>> from persample.rl import make_envs
        >>> optimal_actions(transition_table(make_envs("persample/RandomWalk-v0", 1)), 0.9)
        tensor([0, 1, 1, 1, 1, 1, 0])
    """
    rewards, following = _model(table)
    values = torch.zeros(len(table), dtype=torch.float64)
    for _ in range(100_000):
        action_values = rewards + discount * following @ values
        values, previous = action_values.amax(1), values
        if (values - previous).abs().max() <= 1e-12:
            break
    # Rounding must not choose between tied actions.
    return (action_values >= values[:, None] - 1e-9).int().argmax(1)


def _model(table: Table) -> tuple[Tensor, Tensor]:
    """Return expected rewards ``[S, A]`` and the probabilities of non-terminal next states ``[S, A, S]``."""
    states, actions = len(table), len(table[0])
    rewards = torch.zeros(states, actions, dtype=torch.float64)
    following = torch.zeros(states, actions, states, dtype=torch.float64)
    for s in range(states):
        for a in range(actions):
            for probability, s_t, r_t, terminated in table[s][a]:
                rewards[s, a] += probability * r_t
                following[s, a, s_t] += probability * (not terminated)
    return rewards, following
