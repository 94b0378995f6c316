"""Steps of temporal-difference learning for any differentiable value function: TD(λ); GTD2 and TDC off-policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.inputs import Engine
from persample.losses import td_learning
from persample.per_sample import per_sample_grads
from persample.reductions import Aux, Dot, Mean, Stack
from persample.utils import trees
from persample.utils.trees import Tree


class TDLambdaStep(NamedTuple):
    """The result of one step of TD(λ).

    Attributes:
        update: −(1/B) Σᵢ δᵢ eᵢ, a tree like the parameters: the gradient for ``set_grads`` or ``θ − α·update``.
        traces: γᵢ λ eᵢ, for the next step; a tree with leaves ``[B, *shape]``.
        td_errors: δᵢ, ``[B]``.
    """

    update: Tree
    traces: Tree
    td_errors: Tensor


def td_lambda_step(
    value_fn: Callable[..., Tensor],
    params: Tree,
    traces: Tree,
    transitions: tuple[Tree, Tensor, Tensor, Tree],
    lambda_: float,
    *,
    done_t: Tensor | None = None,
    engine: Engine = "eager",
) -> TDLambdaStep:
    """Make one step of TD(λ) with accumulating traces in B streams: eᵢ ← γᵢ λ eᵢ + ∇v(sᵢ), θ ← θ + α (1/B) Σᵢ δᵢ eᵢ.

    Every stream has its own trace, which needs the gradient of the stream's own value. Source: Sutton and
    Barto, "Reinforcement Learning" (2nd edition, 2018), section 12.2.

    Args:
        value_fn: ``value_fn(params, s)``, the value of one state, ``[]``.
        params: a pytree of tensors, or an ``nn.Module``, as in ``per_sample_grads``.
        traces: the traces of the previous step; None at the beginning.
        transitions: (s_tm1, r_t, discount_t, s_t), one row per stream: ``[B, …]``. A discount of 0 ends a trace.
        lambda_: λ, from 0 to 1.
        done_t: True where the stream continues with a new episode, ``[B]``, bool; needed for truncated episodes, whose
            discount is not 0.
        engine: the engine of ``per_sample_grads``.

    Returns:
        The update, the next traces, and the TD errors.

    Examples:
        >>> theta, s_tm1, s_t = torch.zeros(2), torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> value_fn = lambda theta, s: s @ theta
        >>> first = td_lambda_step(value_fn, theta, None, (s_tm1, torch.zeros(1), torch.ones(1), s_t), 0.5)
        >>> end = (s_t, torch.ones(1), torch.zeros(1), s_t)
        >>> td_lambda_step(value_fn, theta, first.traces, end, 0.5).update
        tensor([-0.5000, -1.0000])
    """
    gradients, errors = per_sample_grads(_valued(value_fn), params, transitions, (Stack(), Aux()), engine=engine)
    if traces is not None:
        gradients = trees.tree_map(torch.add, gradients, traces)
    decay = transitions[2] * lambda_
    if done_t is not None:
        decay = torch.where(done_t, 0, decay)
    update = trees.tree_map(lambda e: -torch.tensordot(errors, e, 1) / len(errors), gradients)
    return TDLambdaStep(update, trees.tree_map(lambda e: torch.einsum("b,b...->b...", decay, e), gradients), errors)


class GradientTDStep(NamedTuple):
    """The gradients of one step of gradient TD; each is subtracted with its own step size.

    Attributes:
        params: the gradient for the parameters θ, a tree like θ.
        weights: the gradient for the auxiliary weights w, a tree like w.
    """

    params: Tree
    weights: Tree


def gradient_td_step(
    value_fn: Callable[..., Tensor],
    params: Tree,
    weights: Tree,
    transitions: tuple[Tree, Tensor, Tensor, Tree],
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

    def surrogate(params: Tree, weights: Tree, s_tm1: Tree, s_t: Tree, *scalars: Tensor) -> Tensor:
        discount, ratio, error, dot = scalars
        gradient, v_tm1 = torch.func.grad_and_value(value_fn)(params, s_tm1)
        curved = sum(map(torch.vdot, _flat(gradient), _flat(weights)), torch.zeros_like(v_tm1))  # ∇vᵀw
        forward = dot if method == "gtd2" else error
        main = ratio * (forward * v_tm1 - discount * dot * value_fn(params, s_t))
        return (ratio * error - dot) * curved - main

    s_tm1, _, discount_t, s_t = transitions
    dots, errors = per_sample_grads(_valued(value_fn), params, transitions, (Dot(weights), Aux()), engine=engine)
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


def _flat(tree: object) -> list[Tensor]:
    return [leaf.flatten() for leaf in trees.flatten(tree)[0]]


def _valued(value_fn: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the loss v(s) of one transition, with the TD error as aux."""

    def value_and_error(params: Tree, s_tm1: Tree, r_t: Tensor, discount_t: Tensor, s_t: Tree) -> tuple[Tensor, Tensor]:
        v_tm1 = value_fn(params, s_tm1)
        return v_tm1, td_learning(v_tm1, r_t, discount_t, value_fn(params, s_t))

    return value_and_error
