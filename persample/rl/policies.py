"""Policies: any callable from observations and a generator to actions; here the one for discrete actions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from persample.errors import ArgumentError
from persample.rl.check import Policy


def categorical_policy(network: nn.Module) -> Policy:
    """Make the policy that samples actions from softmax(network(observations)).

    The network is called without grad, in the train or eval mode it is in, on its own device. All randomness of the
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
        device = next((parameter.device for parameter in network.parameters()), observations.device)
        with torch.no_grad():
            logits = network(observations.to(device))
            if logits.ndim != 2 or len(logits) != len(observations):
                expected, received = f"logits of shape [{len(observations)}, A]", f"shape {tuple(logits.shape)}"
                fix = "It maps a batch of observations to one row of logits each."
                raise ArgumentError.about("network", expected=expected, received=received, fix=fix)
            probabilities = torch.softmax(logits.to(generator.device, torch.float32), dim=-1)
            return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)

    return policy
