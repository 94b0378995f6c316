"""Policies of networks, callables from observations and a generator to actions; and small networks.

The networks are for environments with flat or discrete observations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeGuard, cast

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

from persample.errors import ArgumentError
from persample.losses import gaussian_log_prob
from persample.rl.environments import Envs, Network, Policy, Space
from persample.utils.trees import Tree


def categorical_policy(network: Network) -> Policy:
    """Make the policy that samples actions from softmax(network(observations)).

    The network is called without grad; a module in its current mode (train or eval), on its own device. All randomness
    of the sampling comes from the generator (a network with active dropout draws from the global one).

    Args:
        network: a module or any other callable, from observations ``[N, *obs]`` to logits ``[N, A]`` of the actions
            0 … A−1, to a ``Categorical``, or (an actor-critic) to a pair of either and the values ``[N]``.

    Returns:
        A function ``(observations [N, *obs], generator) → actions [N]``, int64, on the generator's device.

    Raises:
        ArgumentError: if ``network`` is not callable; when called, if it returns anything else.

    Examples:
        >>> def always_last(observations):
        ...     return torch.tensor([-100.0, 100.0]).expand(len(observations), 2)
        >>> categorical_policy(always_last)(torch.zeros(3, 4), torch.Generator().manual_seed(0))
        tensor([1, 1, 1])
    """

    def sample(output: Tree, count: int, generator: torch.Generator) -> Tensor:
        logits = _logits(output, count).to(generator.device, torch.float32)
        return torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator).squeeze(1)

    return _sampling(network, sample)


def gaussian_policy(network: Network) -> Policy:
    """Make the policy that samples actions from N(μ, diag σ²) with (μ, σ) = network(observations).

    The network is called as by ``categorical_policy``; the noise comes from the generator. Actions may exceed the
    bounds of an environment (many environments clip them). The matching losses are those of ``persample.losses`` named
    ``gaussian_…``.

    Args:
        network: a module or any other callable, from observations ``[N, *obs]`` to means ``[N, D]`` and positive
            standard deviations ``[N, D]``, ``[D]`` or ``[]``; to a ``Normal`` (``Independent`` or not); or (an
            actor-critic) to a pair of either and the values ``[N]``.

    Returns:
        A function ``(observations [N, *obs], generator) → actions [N, D]``, float32, on the generator's device.

    Raises:
        ArgumentError: if ``network`` is not callable; when called, if it returns anything else.

    Examples:
        >>> def constant(observations):
        ...     return torch.full((len(observations), 1), 2.0), torch.tensor(1e-9)
        >>> gaussian_policy(constant)(torch.zeros(3, 4), torch.Generator().manual_seed(0)).squeeze(1)
        tensor([2., 2., 2.])
    """

    def sample(output: Tree, count: int, generator: torch.Generator) -> Tensor:
        mu, sigma = (x.to(generator.device, torch.float32) for x in _mean_and_deviation(output, count))
        return mu + sigma * torch.randn(mu.shape, generator=generator, device=generator.device)

    return _sampling(network, sample)


def as_policy(policy: Policy | Network, space: Space) -> Policy:
    """Return a policy as it is; turn a network, which takes observations alone, into the policy of its distribution."""
    if not callable(policy):
        expected = "a function (observations, generator) → actions, or a network (observations) → logits"
        fix = "Pass the function or the network itself."
        raise ArgumentError.about("policy", expected=expected, received=type(policy).__name__, fix=fix)
    if not _is_network(policy):
        return cast("Policy", policy)
    return gaussian_policy(policy) if isinstance(space, spaces.Box) else categorical_policy(policy)


def _is_network(call: Callable[..., Tree]) -> TypeGuard[Network]:
    try:
        parameters = inspect.signature(call.forward if isinstance(call, nn.Module) else call).parameters.values()
    except ValueError:  # a builtin has no signature
        return False
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = [p for p in parameters if p.kind in kinds and (p.default is p.empty or p.name == "generator")]
    return len(given) == 1


def _sampling(network: Network, sample: Callable[[Tree, int, torch.Generator], Tensor]) -> Policy:
    """Return the policy that samples from the outputs of a network."""
    if not callable(network):
        fix = "Pass a module or a function that maps observations to the distribution of actions."
        raise ArgumentError.about("network", expected="a callable", received=type(network).__name__, fix=fix)

    def policy(observations: Tensor, generator: torch.Generator) -> Tensor:
        parameters = network.parameters() if isinstance(network, nn.Module) else ()
        device = next((parameter.device for parameter in parameters), observations.device)
        with torch.no_grad():
            return sample(network(observations.to(device)), len(observations), generator)

    return policy


def _logits(output: Tree, count: int) -> Tensor:
    expected, fix = f"logits of shape [{count}, A]", "It maps a batch of observations to one row of logits each."
    if _is_pair(output):
        output, values = output
        if values.shape not in {(count,), (count, 1)}:
            expected, received = f"(logits [{count}, A], values [{count}])", f"values of shape {list(values.shape)}"
            fix = "Return the logits first."
            raise ArgumentError.about("network", expected=expected, received=received, fix=fix)
    logits = output.logits if isinstance(output, Categorical) else output
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != count:
        received = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(output).__name__
        fix = f"{fix} A function that returns actions is a policy: it takes (observations, generator)."
        raise ArgumentError.about("network", expected=expected, received=received, fix=fix)
    return logits


def _mean_and_deviation(output: Tree, count: int) -> tuple[Tensor, Tensor]:
    if _is_pair(output) and not isinstance(output[0], Tensor):  # a distribution and values
        output = output[0]
    normal = output.base_dist if isinstance(output, Independent) else output
    output = (normal.loc, normal.scale) if isinstance(normal, Normal) else output
    received = type(output).__name__
    if _is_pair(output) and isinstance(output[0], Tensor):
        mu, sigma = output
        fits = mu.ndim == 2 and len(mu) == count and sigma.shape in {mu.shape, mu.shape[1:], mu.shape[2:]}
        if fits and bool((sigma > 0).all()):
            return mu, sigma
        received = f"shapes {list(mu.shape)} and {list(sigma.shape)}" + (", not all positive" if fits else "")
    expected = f"means of shape [{count}, D] and positive standard deviations of the same shape, [D] or []"
    fix = "It returns a pair, such as (mean, log_sigma.exp())."
    raise ArgumentError.about("network", expected=expected, received=received, fix=fix)


def _is_pair(output: object) -> bool:
    return isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], Tensor)


class Features(nn.Module):
    """Turns observations into vectors: states of a Discrete space become one-hot, those of a flat Box are unchanged."""

    def __init__(self, space: Space) -> None:
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


def mlp(space: Space, hidden: int, outputs: int) -> nn.Sequential:
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


def linear(space: Space) -> nn.Sequential:
    """Return a linear function of the features to ``[*, 1]``, zero at first; for a Discrete space, it is a table."""
    features = Features(space)
    table = nn.Linear(features.size, 1, bias=False)
    nn.init.zeros_(table.weight)
    return nn.Sequential(features, table)


class Gaussian(nn.Module):
    """A Gaussian policy: a perceptron for the mean, and a standard deviation for all observations, 1 at first."""

    def __init__(self, space: Space, hidden: int, size: int) -> None:
        super().__init__()
        self.mean = mlp(space, hidden, size)
        self.log_sigma = nn.Parameter(torch.zeros(size))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Return means, ``[*, D]``, and standard deviations, ``[D]``, at observations."""
        return self.mean(observations), self.log_sigma.exp()


class ActorCritic(nn.Module):
    """A policy for discrete actions or vectors of real numbers (Box), and a value function: two perceptrons."""

    def __init__(self, envs: Envs, hidden: int) -> None:
        super().__init__()
        space, actions = envs.single_observation_space, envs.single_action_space
        if isinstance(actions, spaces.Box) and len(actions.shape) == 1:
            self.policy: nn.Module = Gaussian(space, hidden, actions.shape[0])
        else:
            self.policy = mlp(space, hidden, count_actions(actions))
        self.critic = mlp(space, hidden, 1)

    def value(self, observations: Tensor) -> Tensor:
        """Return the estimated values, ``[*]``, of observations."""
        return self.critic(observations).squeeze(-1)


class Evaluation(nn.Module):
    """A value function, from observations to ``[*, 1]``, and the policy that it evaluates.

    Its probabilities π(a|s) are ``[S, A]``, or ``[1, A]`` if they are equal in all states; its exact values ``[S]``, or
    ``[0]`` if they are unknown.
    """

    probabilities: Tensor
    exact: Tensor

    def __init__(self, value: nn.Module, probabilities: Tensor, exact: Tensor) -> None:
        super().__init__()
        self.value = value
        self.register_buffer("probabilities", probabilities)
        self.register_buffer("exact", exact)

    def forward(self, observations: Tensor) -> Tensor:
        """Return values, ``[*]``, of observations, ``[*, *obs]``."""
        return self.value(observations).squeeze(-1)

    def policy(self, observations: Tensor, generator: torch.Generator) -> Tensor:
        """Return random actions, ``[N]``, at observations, ``[N, *obs]``."""
        everywhere = len(self.probabilities) == 1
        rows = self.probabilities.expand(len(observations), -1) if everywhere else self.probabilities[observations]
        return torch.multinomial(rows, 1, generator=generator).squeeze(1)


def log_prob(policy: nn.Module, observations: Tensor, actions: Tensor) -> Tensor:
    """Return log π(a|s), ``[*]``, of the policy of an ``ActorCritic``; actions are ``[*]``, or ``[*, D]`` of a Box."""
    outputs = policy(observations)
    if isinstance(outputs, tuple):
        mu, sigma = outputs
        return gaussian_log_prob(mu, sigma, actions)
    return torch.log_softmax(outputs, -1).gather(-1, actions[..., None]).squeeze(-1)


def count_actions(space: Space) -> int:
    """Return the number of actions of a Discrete space that starts at 0; reject any other space."""
    if not isinstance(space, spaces.Discrete):
        continuous = " (continuous actions)" if isinstance(space, spaces.Box) else ""
        raise ArgumentError(f"env: needs a Discrete action space, received {type(space).__name__}{continuous}")
    if space.start != 0:
        raise ArgumentError(f"env: needs a Discrete action space that starts at 0, received {space}")
    return int(space.n)
