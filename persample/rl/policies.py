"""Policies of networks. A policy is a callable from observations and a generator to actions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from persample.errors import ArgumentError
from persample.rl.check import Policy


def categorical_policy(network: nn.Module) -> Policy:
    """Make the policy that samples actions from softmax(network(observations)).

    The network is called without grad, in its current mode (train or eval), on its own device. All randomness of the
    sampling comes from the generator (a network with active dropout draws from the global one).

    Args:
        network: maps observations ``[N, *obs]`` to logits ``[N, A]`` of the actions 0 … A−1.

    Returns:
        A function ``(observations [N, *obs], generator) → actions [N]``, int64, on the generator's device.

    Raises:
        ArgumentError: when called, if the logits are not ``[N, A]``.

    Examples:
        >>> always_last = nn.Linear(4, 2)
        >>> _ = nn.init.zeros_(always_last.weight), always_last.bias.data.copy_(torch.tensor([-100.0, 100.0]))
        >>> categorical_policy(always_last)(torch.zeros(3, 4), torch.Generator().manual_seed(0))
        tensor([1, 1, 1])
    """

    def policy(observations: Tensor, generator: torch.Generator) -> Tensor:
        with torch.no_grad():
            logits = _called(network, observations)
            if logits.ndim != 2 or len(logits) != len(observations):
                expected, received = f"logits of shape [{len(observations)}, A]", f"shape {tuple(logits.shape)}"
                fix = "It maps a batch of observations to one row of logits each."
                raise ArgumentError.about("network", expected=expected, received=received, fix=fix)
            probabilities = torch.softmax(logits.to(generator.device, torch.float32), dim=-1)
            return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)

    return policy


def gaussian_policy(network: nn.Module) -> Policy:
    """Make the policy that samples actions from N(μ, diag σ²) with (μ, σ) = network(observations).

    The network is called without grad, in its current mode (train or eval), on its own device; the noise comes from the
    generator. Actions may exceed the bounds of an environment (many environments clip them). The matching losses are
    those of ``persample.losses`` named ``gaussian_…``.

    Args:
        network: maps observations ``[N, *obs]`` to means ``[N, D]`` and positive standard deviations ``[N, D]``,
            ``[D]`` or ``[]``.

    Returns:
        A function ``(observations [N, *obs], generator) → actions [N, D]``, float32, on the generator's device.

    Raises:
        ArgumentError: when called, if the network returns anything else.

    Examples:
        >>> class Constant(nn.Module):
        ...     def forward(self, observations):
        ...         return torch.full((len(observations), 1), 2.0), torch.tensor(1e-9)
        >>> gaussian_policy(Constant())(torch.zeros(3, 4), torch.Generator().manual_seed(0)).squeeze(1)
        tensor([2., 2., 2.])
    """

    def policy(observations: Tensor, generator: torch.Generator) -> Tensor:
        with torch.no_grad():
            mu_sigma = _checked(_called(network, observations), len(observations))
            mu, sigma = (x.to(generator.device, torch.float32) for x in mu_sigma)
            return mu + sigma * torch.randn(mu.shape, generator=generator, device=generator.device)

    return policy


def _called(network: nn.Module, observations: Tensor) -> Any:
    device = next((parameter.device for parameter in network.parameters()), observations.device)
    return network(observations.to(device))


def _checked(output: Any, count: int) -> tuple[Tensor, Tensor]:
    received = type(output).__name__
    if isinstance(output, tuple) and len(output) == 2 and all(isinstance(x, Tensor) for x in output):
        mu, sigma = output
        fits = mu.ndim == 2 and len(mu) == count and sigma.shape in {mu.shape, mu.shape[1:], mu.shape[2:]}
        if fits and bool((sigma > 0).all()):
            return mu, sigma
        received = f"shapes {list(mu.shape)} and {list(sigma.shape)}" + (", not all positive" if fits else "")
    expected = f"means of shape [{count}, D] and positive standard deviations of the same shape, [D] or []"
    fix = "It returns a pair, such as (mean, log_sigma.exp())."
    raise ArgumentError.about("network", expected=expected, received=received, fix=fix)
