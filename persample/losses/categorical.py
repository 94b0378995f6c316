"""Categorical policies: log-probabilities of discrete actions, and the ratios of two policies."""

from __future__ import annotations

import torch
from torch import Tensor

from persample.losses.check import check_actions, check_same
from persample.losses.modes import overridable
from persample.losses.steps import taken


@overridable
def categorical_log_prob(logits_t: Tensor, a_t: Tensor) -> Tensor:
    """Compute log π(aₜ|sₜ) of a categorical policy.

    The result is finite for all finite logits. A logit of −∞ gives its action probability 0.

    Args:
        logits_t: unnormalized log-probabilities of the actions, ``[*, A]``.
        a_t: actions, integers, ``[*]``.

    Returns:
        The log-probabilities, ``[*]``.

    Raises:
        ArgumentError: if shapes do not fit, or actions are not integers.

    Examples:
        >>> categorical_log_prob(torch.tensor([[0.0, 0.0], [1000.0, -1000.0]]), torch.tensor([0, 1]))
        tensor([-6.9315e-01, -2.0000e+03])
    """
    check_actions("logits_t", logits_t, a_t=a_t)
    return taken(torch.log_softmax(logits_t, dim=-1), a_t)


@overridable
def categorical_importance_sampling_ratios(pi_logits_t: Tensor, mu_logits_t: Tensor, a_t: Tensor) -> Tensor:
    """Compute the ratios π(aₜ|sₜ)/μ(aₜ|sₜ) of two categorical policies.

    Name and argument order follow RLax.

    Args:
        pi_logits_t: unnormalized log-probabilities under the target policy π, ``[*, A]``.
        mu_logits_t: unnormalized log-probabilities under the behaviour policy μ, ``[*, A]``.
        a_t: actions taken by μ, integers, ``[*]``.

    Returns:
        The ratios, ``[*]``.

    Raises:
        ArgumentError: if shapes do not fit, or actions are not integers.

    Examples:
        >>> pi, mu = torch.tensor([[3.0, 1.0]]).log(), torch.zeros(1, 2)
        >>> categorical_importance_sampling_ratios(pi, mu, torch.tensor([0]))
        tensor([1.5000])
    """
    check_same(pi_logits_t=pi_logits_t, mu_logits_t=mu_logits_t)
    return (categorical_log_prob(pi_logits_t, a_t) - categorical_log_prob(mu_logits_t, a_t)).exp()
