"""Small networks for environments with flat or discrete observations."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from persample.errors import ArgumentError


class Features(nn.Module):
    """Turns observations into vectors: states of a Discrete space become one-hot, those of a flat Box are unchanged.

    Args:
        space: the space of one observation.

    Raises:
        ArgumentError: if the space is neither.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__()
        self.start = 0
        self.one_hot = isinstance(space, spaces.Discrete)
        if isinstance(space, spaces.Discrete):
            self.start, self.size = int(space.start), int(space.n)
        elif isinstance(space, spaces.Box) and len(space.shape) == 1:
            self.size = space.shape[0]
        else:
            received = f"{type(space).__name__} of shape {space.shape}" if space.shape else type(space).__name__
            raise ArgumentError(f"env: needs a flat Box or a Discrete observation space, received {received}")

    def forward(self, observations: Tensor) -> Tensor:
        """Encode observations.

        Args:
            observations: ``[*, d]`` of a Box, ``[*]`` of a Discrete space.

        Returns:
            The features, ``[*, size]``, of torch's default dtype.
        """
        dtype = torch.get_default_dtype()
        if self.one_hot:
            # F.one_hot reads values, which vmap cannot batch.
            states = torch.arange(self.start, self.start + self.size, device=observations.device)
            return (observations[..., None] == states).to(dtype)
        return observations.to(dtype)


def mlp(space: spaces.Space[Any], hidden: int, outputs: int) -> nn.Sequential:
    """Make a perceptron with two hidden layers of tanh units.

    Args:
        space: the space of one observation.
        hidden: width of the hidden layers.
        outputs: number of outputs.

    Returns:
        The network, from observations to ``[*, outputs]``, with torch's default initialization.
    """
    features = Features(space)
    return nn.Sequential(
        features,
        nn.Linear(features.size, hidden),
        nn.Tanh(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, outputs),
    )


def linear(space: spaces.Space[Any]) -> nn.Sequential:
    """Make a linear function of the features, initialized to zero; for a Discrete space, it is a table.

    Args:
        space: the space of one observation.

    Returns:
        The network, from observations to ``[*, 1]``.
    """
    features = Features(space)
    table = nn.Linear(features.size, 1, bias=False)
    nn.init.zeros_(table.weight)
    return nn.Sequential(features, table)


class ActorCritic(nn.Module):
    """A policy and a value function: two perceptrons without shared parameters.

    Args:
        space: the space of one observation.
        hidden: width of the hidden layers.
        actions: number of actions A.
    """

    def __init__(self, space: spaces.Space[Any], hidden: int, actions: int) -> None:
        super().__init__()
        self.policy = mlp(space, hidden, actions)
        self.critic = mlp(space, hidden, 1)

    def value(self, observations: Tensor) -> Tensor:
        """Estimate returns.

        Args:
            observations: ``[*, *obs]``.

        Returns:
            Values, ``[*]``.
        """
        return self.critic(observations).squeeze(-1)


def count_actions(space: spaces.Space[Any]) -> int:
    """Count the actions of a Discrete space.

    Args:
        space: the space of one action.

    Returns:
        The number of actions A; the actions are 0 … A−1.

    Raises:
        ArgumentError: if the space is of another kind, or does not start at 0.
    """
    if not isinstance(space, spaces.Discrete):
        continuous = " (continuous actions)" if isinstance(space, spaces.Box) else ""
        raise ArgumentError(f"env: needs a Discrete action space, received {type(space).__name__}{continuous}")
    if space.start != 0:
        raise ArgumentError(f"env: needs a Discrete action space that starts at 0, received {space}")
    return int(space.n)
