"""Recurrences h_t = cell(x_t, W h_{t-1} + b, h_{t-1}), unrolled or as a scan.

Under vmap and vjp every operation of an unrolled step passes through all levels of torch.func, and every use of the
weight makes one more gradient of its size per sample. A scan runs the steps on plain tensors, and uses the weight once:
it computes the states, then W h + b for all steps at once, and in the backward pass scans the steps in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample.vmap_rules.batched import is_batched
from persample.vmap_rules.derivatives import reject_second_derivative
from persample.vmap_rules.loops import looped, repeated
from persample.vmap_rules.samples_as_rows import NotDifferentiated, SamplesAsRows

# (gates of the input, gates of the state, *state) → state, elementwise; W multiplies the first tensor of the state.
Cell = Callable[..., tuple[Tensor, ...]]
# (cell, gates, weight, bias, *initial) → states, as ``unrolled``
Recurrence = Callable[..., tuple[Tensor, ...]]
Derivatives = dict[int, Tensor]  # index of an output → its derivative by one input; left out where it is zero


def scan(cell: Cell, gates: Tensor, weight: Tensor, bias: Tensor | None, *initial: Tensor) -> tuple[Tensor, ...]:
    """Run a recurrence as a scan, for a loss that is differentiated once.

    Args:
        cell: one step.
        gates: the gates of the inputs, ``[T, N, G]``.
        weight: W, from a state to its gates, ``[G, H]``.
        bias: b, ``[G]``.
        *initial: the state before the first step, ``[1, N, H]`` each.

    Returns:
        The states after each step, ``[T, N, H]`` each.
    """
    if is_batched(weight) or (bias is not None and is_batched(bias)):
        return unrolled(cell, gates, weight, bias, *initial)
    states = NotDifferentiated.apply(partial(_states, looped), cell, gates, weight, bias, *initial)
    # The states that W multiplies are constants here: right for the first derivative, wrong for a second one.
    before = torch.cat([initial[0].detach(), states[0][:-1]])
    return _Scan.apply(cell, gates, F.linear(before, weight, bias), weight, *initial, *states)


def unrolled(cell: Cell, gates: Tensor, weight: Tensor, bias: Tensor | None, *initial: Tensor) -> tuple[Tensor, ...]:
    """Run a recurrence operation by operation: with any cell, under any transforms.

    Args:
        cell: one step.
        gates: the gates of the inputs, ``[T, N, G]``.
        weight: W, from a state to its gates, ``[G, H]``.
        bias: b, ``[G]``.
        *initial: the state before the first step, ``[1, N, H]`` each.

    Returns:
        The states after each step, ``[T, N, H]`` each.
    """
    return _states(repeated, cell, gates, weight, bias, *initial)


def _states(
    loop: Callable[..., tuple[Tensor, ...]],
    cell: Cell,
    gates: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *initial: Tensor,
) -> tuple[Tensor, ...]:
    def step(state: Sequence[Tensor], row: Sequence[Tensor], *affine: Tensor) -> Sequence[Tensor]:
        return cell(row[0], F.linear(state[0], *affine), *state)

    return loop(step, [x[0] for x in initial], [gates], *([weight] if bias is None else [weight, bias]))


class _Scan(SamplesAsRows):
    """The computed states, as a function of both kinds of gates and of the initial state; defines the gradient."""

    @staticmethod
    def forward(cell: Cell, gates: Tensor, products: Tensor, weight: Tensor, *states: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        return tuple(x.view_as(x) for x in states[len(states) // 2 :])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        ctx.cell, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        reject_second_derivative()
        gates, products, *initial = NotDifferentiated.apply(_gradients, ctx.cell, *ctx.saved_tensors, *grads)
        return None, gates, products, None, *initial, *(None for _ in grads)


def _gradients(cell: Cell, gates: Tensor, products: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Return the gradients of the gates of the inputs, of those of the states, and of the initial state."""
    size = len(rest) // 3
    initial, states, grads = rest[:size], rest[size : 2 * size], rest[2 * size :]
    before = [torch.cat([first, after[:-1]]) for first, after in zip(initial, states, strict=True)]
    by_gates, by_products, *by_state = _derivatives(cell, gates, products, *before)
    grads = tuple(torch.zeros_like(x) if g is None else g for x, g in zip(states, grads, strict=True))
    weight = weight.to(gates.dtype)  # under autocast it has another
    whole, first = _reverse_scan(by_products, by_state, grads, weight)
    whole = [x.unsqueeze(-2) for x in whole]
    by_input = _chain(by_gates, whole).flatten(-2)
    return by_input, by_input if by_products is by_gates else _chain(by_products, whole).flatten(-2), *first


def _derivatives(cell: Cell, *inputs: Tensor) -> list[Derivatives]:
    """Return the derivatives of a cell by each input, for all steps at once."""
    # The cell is elementwise, so the gradients of the sums of its outputs are its derivatives.
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        sums = [x.sum() for x in cell(*leaves)]
    rows = [torch.autograd.grad(x, leaves, retain_graph=True, allow_unused=True) for x in sums]
    columns = [{j: x for j, x in enumerate(column) if x is not None} for column in zip(*rows, strict=True)]
    width = inputs[-1].shape[-1]
    by_gates, by_products = ({j: x.unflatten(-1, (-1, width)) for j, x in column.items()} for column in columns[:2])
    # Of a cell that reads their sum, as an LSTM's, autograd returns the same tensors for both.
    is_sum = columns[0].keys() == columns[1].keys() and all(columns[0][j] is x for j, x in columns[1].items())
    return [by_gates, by_gates if is_sum else by_products, *columns[2:]]


def _reverse_scan(
    by_products: Derivatives, by_state: Sequence[Derivatives], grads: Sequence[Tensor], weight: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of all states, each with those of the states after it; and those of the initial state."""
    columns = [by_products, *by_state]
    earlier = [F.pad(g[:-1], (0, 0, 0, 0, 1, 0)) for g in grads]  # zeros for the initial state
    sequences = [x for column in columns for x in column.values()]

    def step(later: Sequence[Tensor], row: Sequence[Tensor], weight: Tensor) -> Sequence[Tensor]:
        parts = iter(row)
        into_products, *into_state = ({j: next(parts) for j in column} for column in columns)
        signal = _chain(into_products, [x.unsqueeze(-2) for x in later]).flatten(-2)
        first, *others = (_chain(column, later, g) for column, g in zip(into_state, parts, strict=True))
        return torch.addmm(first, signal, weight), *others

    last = [g[-1] for g in grads]
    before = looped(step, last, [*sequences, *earlier], weight, reverse=True)
    whole = [torch.cat([x[1:], g[-1:]]) for x, g in zip(before, grads, strict=True)]
    return whole, [x[:1] for x in before]


def _chain(column: Derivatives, signals: Sequence[Tensor], total: Any = None) -> Tensor:
    """Apply the chain rule: return ``total`` plus Σⱼ derivativeⱼ · signalⱼ."""
    for j, x in column.items():
        total = x * signals[j] if total is None else torch.addcmul(total, x, signals[j])
    return total
