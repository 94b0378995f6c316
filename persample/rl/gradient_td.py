"""Gradient TD for any differentiable value function: GTD2 and TDC, which converge off-policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.inputs import Engine
from persample.losses import td_learning
from persample.per_sample import per_sample_grads
from persample.reductions import Aux, Dot, Mean
from persample.utils import trees


class GradientTDStep(NamedTuple):
    """The gradients of one step of gradient TD; each is subtracted with its own step size.

    Attributes:
        params: the gradient for the parameters θ, a tree like θ.
        weights: the gradient for the auxiliary weights w, a tree like w.
    """

    params: Any
    weights: Any


def gradient_td_step(
    value_fn: Callable[..., Tensor],
    params: Any,
    weights: Any,
    transitions: tuple[Any, Tensor, Tensor, Any],
    ratio_t: Tensor,
    *,
    method: str = "tdc",
    engine: Engine = "eager",
) -> GradientTDStep:
    """Make one step of TDC or GTD2 on B transitions.

    The means over the transitions, with φ = ∇v(s) and φ′ = ∇v(s′):

    - GTD2: θ ← θ + α [ρ (φ − γφ′)(φᵀw) − h]
    - TDC: θ ← θ + α [ρ (δφ − γφ′(φᵀw)) − h]
    - both: w ← w + β (ρδ − φᵀw) φ

    φᵀw uses the gradient of each sample. h = (ρδ − φᵀw) ∇²v(s) w is the curvature term, which is 0 for linear value
    functions. Sources: Sutton et al., "Fast Gradient-Descent Methods for Temporal-Difference Learning
    with Linear Function Approximation" (2009); Maei et al., "Convergent Temporal-Difference Learning with Arbitrary
    Smooth Function Approximation" (2009).

    Args:
        value_fn: ``value_fn(params, s)``, the value of one state, ``[]``.
        params: θ, a pytree of tensors (of a module: ``dict(module.named_parameters())`` and ``functional_call``).
        weights: w, a tree like the parameters.
        transitions: (s_tm1, r_t, discount_t, s_t), ``[B, …]``.
        ratio_t: importance sampling ratios ρ = π(a|s)/μ(a|s), ``[B]``; ones on-policy.
        method: "tdc" or "gtd2".
        engine: the engine of ``per_sample_grads``.

    Returns:
        The gradients, with signs for descent: θ − α·params, w − β·weights.

    Raises:
        ArgumentError: if the method is none of these.

    Examples:
        >>> theta, w = torch.zeros(2), torch.ones(2)
        >>> transition = (torch.tensor([[1.0, 0.0]]), torch.ones(1), torch.ones(1), torch.tensor([[0.0, 1.0]]))
        >>> gradient_td_step(lambda theta, s: s @ theta, theta, w, transition, torch.ones(1), method="gtd2")
        GradientTDStep(params=tensor([-1.,  1.]), weights=tensor([0., 0.]))
    """
    if method not in {"tdc", "gtd2"}:
        raise ArgumentError.about("method", expected="'tdc' or 'gtd2'", received=repr(method), fix="Pick one of them.")

    def value_and_error(params: Any, s_tm1: Any, r_t: Tensor, discount_t: Tensor, s_t: Any) -> tuple[Tensor, Tensor]:
        v_tm1 = value_fn(params, s_tm1)
        return v_tm1, td_learning(v_tm1, r_t, discount_t, value_fn(params, s_t))

    def surrogate(params: Any, weights: Any, s_tm1: Any, s_t: Any, *scalars: Tensor) -> Tensor:
        discount, ratio, error, dot = scalars
        gradient, v_tm1 = torch.func.grad_and_value(value_fn)(params, s_tm1)
        curved = sum(map(torch.vdot, _flat(gradient), _flat(weights)), torch.zeros_like(v_tm1))  # ∇vᵀw
        forward = dot if method == "gtd2" else error
        main = ratio * (forward * v_tm1 - discount * dot * value_fn(params, s_t))
        return (ratio * error - dot) * curved - main

    s_tm1, _, discount_t, s_t = transitions
    dots, errors = per_sample_grads(value_and_error, params, transitions, (Dot(weights), Aux()), engine=engine)
    batch = (weights, s_tm1, s_t, discount_t, ratio_t, errors, dots)
    in_dims = (None, (None, 0, 0, 0, 0, 0, 0))
    return GradientTDStep(
        per_sample_grads(surrogate, params, batch, Mean(), in_dims=in_dims, engine=engine),
        per_sample_grads(
            lambda params, s, scale: -scale * value_fn(params, s),
            params,
            (s_tm1, ratio_t * errors - dots),
            Mean(),
            engine=engine,
        ),
    )


def _flat(tree: Any) -> list[Tensor]:
    return [leaf.flatten() for leaf in trees.flatten(tree)[0]]
