"""TD(λ) with eligibility traces, for any differentiable value function and many streams of experience."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from persample.inputs import Engine
from persample.losses import td_learning
from persample.per_sample import per_sample_grads
from persample.reductions import Aux, Stack
from persample.utils import trees


class TDLambdaStep(NamedTuple):
    """The result of one step of TD(λ).

    Attributes:
        update: −(1/B) Σᵢ δᵢ eᵢ, a tree like the parameters: the gradient for ``set_grads`` or ``θ − α·update``.
        traces: γᵢ λ eᵢ, for the next step; a tree with leaves ``[B, *shape]``.
        td_errors: δᵢ, ``[B]``.
    """

    update: Any
    traces: Any
    td_errors: Tensor


def td_lambda_step(
    value_fn: Callable[..., Tensor],
    params: Any,
    traces: Any,
    transitions: tuple[Any, Tensor, Tensor, Any],
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

    def value_and_error(params: Any, s_tm1: Any, r_t: Tensor, discount_t: Tensor, s_t: Any) -> tuple[Tensor, Tensor]:
        v_tm1 = value_fn(params, s_tm1)
        return v_tm1, td_learning(v_tm1, r_t, discount_t, value_fn(params, s_t))

    gradients, errors = per_sample_grads(value_and_error, params, transitions, (Stack(), Aux()), engine=engine)
    if traces is not None:
        gradients = trees.tree_map(torch.add, gradients, traces)
    decay = transitions[2] * lambda_
    if done_t is not None:
        decay = torch.where(done_t, 0, decay)
    update = trees.tree_map(lambda e: -torch.tensordot(errors, e, 1) / len(errors), gradients)
    return TDLambdaStep(update, trees.tree_map(lambda e: torch.einsum("b,b...->b...", decay, e), gradients), errors)
