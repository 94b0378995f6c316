"""Small networks for environments with flat or discrete observations."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from persample.errors import ArgumentError
from persample.losses import gaussian_log_prob
from persample.rl.check import Envs, Policy
from persample.rl.policies import categorical_policy, gaussian_policy


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
        """Return the features, ``[*, size]``, of observations: ``[*, d]`` of a Box, ``[*]`` of a Discrete space."""
        dtype = torch.get_default_dtype()
        if self.one_hot:
            # F.one_hot reads values, which vmap cannot batch.
            states = torch.arange(self.start, self.start + self.size, device=observations.device)
            return (observations[..., None] == states).to(dtype)
        return observations.to(dtype)


def mlp(space: spaces.Space[Any], hidden: int, outputs: int) -> nn.Sequential:
    """Return a perceptron with two hidden layers of tanh units, from observations to ``[*, outputs]``."""
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
    """Return a linear function of the features to ``[*, 1]``, zero at first; for a Discrete space, it is a table."""
    features = Features(space)
    table = nn.Linear(features.size, 1, bias=False)
    nn.init.zeros_(table.weight)
    return nn.Sequential(features, table)


class Gaussian(nn.Module):
    """A Gaussian policy: a perceptron for the mean, and a standard deviation for all observations, 1 at first."""

    def __init__(self, space: spaces.Space[Any], hidden: int, size: int) -> None:
        super().__init__()
        self.mean = mlp(space, hidden, size)
        self.log_sigma = nn.Parameter(torch.zeros(size))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Return means, ``[*, D]``, and standard deviations, ``[D]``, at observations."""
        return self.mean(observations), self.log_sigma.exp()


class ActorCritic(nn.Module):
    """A policy and a value function: two perceptrons without shared parameters."""

    def __init__(self, space: spaces.Space[Any], hidden: int, actions: int, *, continuous: bool = False) -> None:
        super().__init__()
        self.policy = (Gaussian if continuous else mlp)(space, hidden, actions)
        self.critic = mlp(space, hidden, 1)

    def value(self, observations: Tensor) -> Tensor:
        """Return the estimated values, ``[*]``, of observations."""
        return self.critic(observations).squeeze(-1)


def actor_critic(envs: Envs, hidden: int) -> ActorCritic:
    """Return policy and value function for discrete actions, or for vectors of real numbers (Box)."""
    space = envs.single_action_space
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return ActorCritic(envs.single_observation_space, hidden, space.shape[0], continuous=True)
    return ActorCritic(envs.single_observation_space, hidden, count_actions(space))


def sampling(policy: nn.Module) -> Policy:
    """Return the function that samples actions of the policy of an ``ActorCritic``, Gaussian or of logits."""
    return gaussian_policy(policy) if isinstance(policy, Gaussian) else categorical_policy(policy)


def log_prob(policy: nn.Module, observations: Tensor, actions: Tensor) -> Tensor:
    """Return log π(a|s), ``[*]``, of the policy of an ``ActorCritic``; actions are ``[*]``, or ``[*, D]`` of a Box."""
    outputs = policy(observations)
    if isinstance(outputs, tuple):
        mu, sigma = outputs
        return gaussian_log_prob(mu, sigma, actions)
    return torch.log_softmax(outputs, -1).gather(-1, actions[..., None]).squeeze(-1)


def count_actions(space: spaces.Space[Any]) -> int:
    """Return the number of actions of a Discrete space that starts at 0; reject any other space."""
    if not isinstance(space, spaces.Discrete):
        continuous = " (continuous actions)" if isinstance(space, spaces.Box) else ""
        raise ArgumentError(f"env: needs a Discrete action space, received {type(space).__name__}{continuous}")
    if space.start != 0:
        raise ArgumentError(f"env: needs a Discrete action space that starts at 0, received {space}")
    return int(space.n)
