"""A recurrence in three passes: the states, the recurrent weight's product for all steps at once, one sweep back.

Under vmap and vjp every operation of every step passes through all of torch.func's levels, and every use of a weight is
one more gradient of its size per sample. Here the steps run on plain tensors, and the weight is used once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample.vmap_rules.rows import Plain, Rows, differentiated_once, is_batched, refuse_graph

# (gates of the input, gates of the state, *state) → state, elementwise; the state's first tensor makes its gates.
Cell = Callable[..., tuple[Tensor, ...]]
Derivatives = dict[int, Tensor]  # which output → its derivative; none where it does not depend on the input


def recur(cell: Cell, gates: Tensor, weight: Tensor, bias: Tensor | None, *initial: Tensor) -> tuple[Tensor, ...]:
    """Run a recurrence.

    Args:
        cell: one step.
        gates: of the inputs, ``[T, N, G]``.
        weight: from a state to its gates, ``[G, H]``.
        bias: ``[G]``.
        *initial: the state before the first step, ``[1, N, H]`` each.

    Returns:
        The states after each step, ``[T, N, H]`` each.
    """
    # The states that the weight is multiplied with are constants here, which a second derivative would notice.
    if not differentiated_once() or is_batched(weight) or (bias is not None and is_batched(bias)):
        return unrolled(cell, gates, weight, bias, *initial)
    states = Plain.apply(unrolled, cell, gates, weight, bias, *initial)
    before = torch.cat([initial[0].detach(), states[0][:-1]])
    return _Swept.apply(cell, gates, F.linear(before, weight, bias), weight, *initial, *states)


def unrolled(cell: Cell, gates: Tensor, weight: Tensor, bias: Tensor | None, *initial: Tensor) -> tuple[Tensor, ...]:
    """Run a recurrence operation by operation: any cell, under any transforms.

    Args:
        cell: one step.
        gates: of the inputs, ``[T, N, G]``.
        weight: from a state to its gates, ``[G, H]``.
        bias: ``[G]``.
        *initial: the state before the first step, ``[1, N, H]`` each.

    Returns:
        The states after each step, ``[T, N, H]`` each.
    """
    state, states = tuple(x[0] for x in initial), []
    for x in gates.unbind(0):
        state = cell(x, F.linear(state[0], weight, bias), *state)
        states.append(state)
    return tuple(torch.stack(column) for column in zip(*states, strict=True))


class _Swept(Rows):
    """The states as a function of both gates and of the initial state: there already, but for their gradient."""

    @staticmethod
    def forward(cell: Cell, gates: Tensor, products: Tensor, weight: Tensor, *states: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        return tuple(x.view_as(x) for x in states[len(states) // 2 :])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        ctx.cell, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        refuse_graph()
        gates, products, *initial = Plain.apply(_signals, ctx.cell, *ctx.saved_tensors, *grads)
        return None, gates, products, None, *initial, *(None for _ in grads)


def _signals(cell: Cell, gates: Tensor, products: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    size = len(rest) // 3
    initial, states, grads = rest[:size], rest[size : 2 * size], rest[2 * size :]
    before = [torch.cat([first, after[:-1]]) for first, after in zip(initial, states, strict=True)]
    by_gates, by_products, *by_state = _derivatives(cell, gates, products, *before)
    grads = tuple(torch.zeros_like(x) if g is None else g for x, g in zip(states, grads, strict=True))
    *totals, first = _sweep(by_products, by_state, grads, weight.to(gates.dtype))  # it differs under autocast
    whole = [torch.stack(column[::-1]).unsqueeze(-2) for column in zip(*totals, strict=True)]
    return _added(by_gates, whole).flatten(-2), _added(by_products, whole).flatten(-2), *(x[None] for x in first)


def _derivatives(cell: Cell, *inputs: Tensor) -> list[Derivatives]:
    # By each input, for all steps at once; elementwise as the cell is, gradients of sums are its derivatives.
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        sums = [x.sum() for x in cell(*leaves)]
    rows = [torch.autograd.grad(x, leaves, retain_graph=True, allow_unused=True) for x in sums]
    columns = [{j: x for j, x in enumerate(column) if x is not None} for column in zip(*rows, strict=True)]
    width = inputs[-1].shape[-1]
    gates = [{j: x.unflatten(-1, (-1, width)) for j, x in column.items()} for column in columns[:2]]
    return [*gates, *columns[2:]]


def _sweep(
    by_products: Derivatives, by_state: Sequence[Derivatives], grads: Sequence[Tensor], weight: Tensor
) -> list[tuple[Tensor, ...]]:
    # The gradients of all states, last first: to each is added what comes back from the state after it.
    incoming = [F.pad(g, (0, 0, 0, 0, 1, 0)).unbind(0) for g in grads]  # to the initial state, nothing
    into_products, *into_state = (_by_step(column, len(grads[0])) for column in (by_products, *by_state))
    totals = [tuple(g[-1] for g in incoming)]
    for t in reversed(range(len(grads[0]))):
        later = totals[-1]
        signal = _added(into_products[t], [x.unsqueeze(-2) for x in later]).flatten(-2)
        first, *others = (_added(column[t], later, g[t]) for column, g in zip(into_state, incoming, strict=True))
        totals.append((torch.addmm(first, signal, weight), *others))
    return totals


def _by_step(column: Derivatives, steps: int) -> list[Derivatives]:
    rows = {j: x.unbind(0) for j, x in column.items()}
    return [{j: x[t] for j, x in rows.items()} for t in range(steps)]


def _added(column: Derivatives, signals: Sequence[Tensor], total: Any = None) -> Tensor:
    for j, x in column.items():
        total = x * signals[j] if total is None else torch.addcmul(total, x, signals[j])
    return total
