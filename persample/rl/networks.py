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


class Gaussian(nn.Module):
    """A Gaussian policy: a perceptron for the mean, and a standard deviation for all observations, 1 at first.

    Args:
        space: the space of one observation.
        hidden: width of the hidden layers.
        size: number of dimensions of an action D.
    """

    def __init__(self, space: spaces.Space[Any], hidden: int, size: int) -> None:
        super().__init__()
        self.mean = mlp(space, hidden, size)
        self.log_sigma = nn.Parameter(torch.zeros(size))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distribution of actions.

        Args:
            observations: ``[*, *obs]``.

        Returns:
            Means, ``[*, D]``, and standard deviations, ``[D]``.
        """
        return self.mean(observations), self.log_sigma.exp()


class ActorCritic(nn.Module):
    """A policy and a value function: two perceptrons without shared parameters.

    Args:
        space: the space of one observation.
        hidden: width of the hidden layers.
        actions: number of actions A; or of dimensions of an action.
        continuous: whether actions are vectors of real numbers.
    """

    def __init__(self, space: spaces.Space[Any], hidden: int, actions: int, *, continuous: bool = False) -> None:
        super().__init__()
        self.policy = (Gaussian if continuous else mlp)(space, hidden, actions)
        self.critic = mlp(space, hidden, 1)

    def value(self, observations: Tensor) -> Tensor:
        """Estimate returns.

        Args:
            observations: ``[*, *obs]``.

        Returns:
            Values, ``[*]``.
        """
        return self.critic(observations).squeeze(-1)


def actor_critic(envs: Envs, hidden: int) -> ActorCritic:
    """Make policy and value function for environments with discrete actions, or with vectors of real numbers.

    Args:
        envs: the environments.
        hidden: width of the hidden layers.

    Returns:
        The module; its policy is Gaussian where the action space is a Box.

    Raises:
        ArgumentError: if the spaces of the environments are of other kinds.
    """
    space = envs.single_action_space
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return ActorCritic(envs.single_observation_space, hidden, space.shape[0], continuous=True)
    return ActorCritic(envs.single_observation_space, hidden, count_actions(space))


def sampling(policy: nn.Module) -> Policy:
    """Return the function that samples actions of a policy, Gaussian or of logits.

    Args:
        policy: the policy of an ``ActorCritic``.
    """
    return gaussian_policy(policy) if isinstance(policy, Gaussian) else categorical_policy(policy)


def log_prob(policy: nn.Module, observations: Tensor, actions: Tensor) -> Tensor:
    """Return log π(a|s), ``[*]``.

    Args:
        policy: the policy of an ``ActorCritic``.
        observations: ``[*, *obs]``.
        actions: ``[*]`` of a Discrete space, ``[*, D]`` of a Box.
    """
    outputs = policy(observations)
    if isinstance(outputs, tuple):
        mu, sigma = outputs
        return gaussian_log_prob(mu, sigma, actions)
    return torch.log_softmax(outputs, -1).gather(-1, actions[..., None]).squeeze(-1)


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
