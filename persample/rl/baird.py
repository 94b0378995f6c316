"""Baird's counterexample: semi-gradient TD(0) diverges with off-policy data and a linear value function."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.losses import td_loss
from persample.per_sample import per_sample_grads
from persample.reductions import Mean
from persample.rl.td_steps import gradient_td_step

# Step sizes (α, β): Sutton and Barto (2018), figures 11.2 and 11.5.
STEP_SIZES = {"td0": (0.01, 0.0), "gtd2": (0.005, 0.05), "tdc": (0.005, 0.05)}


def baird_features() -> Tensor:
    """Return the features of the seven states: v(i) = 2θᵢ + θ₈ of the upper six, v(7) = θ₇ + 2θ₈.

    Returns:
        The features, ``[7, 8]``, float64.

    Examples:
        >>> baird_features()[-2:]
        tensor([[0., 0., 0., 0., 0., 2., 0., 1.],
                [0., 0., 0., 0., 0., 0., 1., 2.]], dtype=torch.float64)
    """
    features = torch.zeros(7, 8, dtype=torch.float64)
    features[:, :7].fill_diagonal_(2.0)
    features[:6, 7], features[6, 6], features[6, 7] = 1.0, 1.0, 2.0
    return features


class BairdRun(NamedTuple):
    """The errors before the first update and after each.

    Attributes:
        value_error: root mean square of the seven values, ``[n + 1]``; the true values are 0.
        bellman_error: root mean square of γ v(7) − v(s), ``[n + 1]``. It equals the projected Bellman
            error, as the features can express every value function.
    """

    value_error: Tensor
    bellman_error: Tensor


def baird_run(method: str, updates: int, *, batch: int = 32, discount: float = 0.99, seed: int = 0) -> BairdRun:
    """Evaluate the policy that always goes to state 7, with data of the policy that draws all states uniformly.

    Rewards are 0, and so are the true values. Source: Baird, "Residual Algorithms" (1995), as in Sutton and Barto,
    "Reinforcement Learning" (2nd edition, 2018), section 11.2.

    Args:
        method: "td0" (the semi-gradient), "gtd2" or "tdc".
        updates: number of updates n.
        batch: transitions per update B.
        discount: γ.
        seed: the seed of the transitions.

    Returns:
        The errors.

    Raises:
        ArgumentError: if the method is unknown.

    Examples:
        >>> run = baird_run("td0", 50)
        >>> bool(run.value_error[-1] > run.value_error[0])
        True
    """
    if method not in STEP_SIZES:
        expected = " or ".join(map(repr, STEP_SIZES))
        raise ArgumentError.about("method", expected=expected, received=repr(method), fix="Pick one of them.")
    alpha, beta = STEP_SIZES[method]
    features, generator = baird_features(), torch.Generator().manual_seed(seed)
    theta = torch.tensor([1.0] * 6 + [10.0, 1.0], dtype=torch.float64)
    w = torch.zeros_like(theta)
    values = [features @ theta]
    for _ in range(updates):
        transitions, ratio_t = _transitions(features, batch, discount, generator)
        if method == "td0":
            theta = theta - alpha * _semi_gradient(theta, transitions, ratio_t)
        else:
            step = gradient_td_step(_value, theta, w, transitions, ratio_t, method=method)
            theta, w = theta - alpha * step.params, w - beta * step.weights
        values.append(features @ theta)
    v = torch.stack(values)
    return BairdRun(_rms(v), _rms(discount * v[:, 6:] - v))


def _value(theta: Tensor, s: Tensor) -> Tensor:
    return s @ theta


def _semi_gradient(theta: Tensor, transitions: tuple[Tensor, ...], ratio_t: Tensor) -> Tensor:
    def loss(theta: Tensor, ratio: Tensor, *transition: Tensor) -> Tensor:
        s_tm1, r_t, discount_t, s_t = transition
        return ratio * td_loss(_value(theta, s_tm1), r_t, discount_t, _value(theta, s_t)) / 2

    gradient: Tensor = per_sample_grads(loss, theta, (ratio_t, *transitions), Mean())
    return gradient


def _transitions(
    features: Tensor, batch: int, discount: float, generator: torch.Generator
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Draw transitions of the behaviour policy: states before and after a step are uniform."""
    s_tm1, s_t = torch.randint(7, (2, batch), generator=generator)
    zeros = torch.zeros(batch, dtype=features.dtype)
    return (features[s_tm1], zeros, zeros + discount, features[s_t]), torch.where(s_t == 6, 7.0, zeros)


def _rms(values: Tensor) -> Tensor:
    return values.square().mean(-1).sqrt()
