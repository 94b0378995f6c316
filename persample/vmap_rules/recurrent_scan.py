"""Recurrences h_t = cell(W x_t + b, W' h_{t-1} + b', h_{t-1}), unrolled or as a scan.

Under vmap and vjp every operation of an unrolled step passes through all levels of torch.func, and every use of a
weight makes one more gradient of its size per sample. A scan runs the steps of all samples on plain tensors, and uses
each weight once: in the backward pass it scans the steps in reverse, and then the signals of all steps are multiplied
with what the weights were applied to.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample.utils.dtypes import autocast, full_precision, is_autocast
from persample.vmap_rules.batched import is_batched
from persample.vmap_rules.kernel_call import Product, call_kernel
from persample.vmap_rules.loops import looped, repeated
from persample.vmap_rules.recurrent_cells import Cell, one_step

# (cell, inputs, initial state, weights) → outputs and the last state, as ``unrolled``
Recurrence = Callable[..., tuple[Tensor, ...]]


def scan(cell: Cell, x: Tensor, initial: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run a recurrence as a scan, for a loss that is differentiated once; see ``unrolled``."""
    if any(map(is_batched, weights)):
        return unrolled(cell, x, initial, weights)
    if is_autocast(x.device):  # tensors are cast here: torch.func differentiates no kernel under autocast
        with full_precision(x.device):
            return scan(cell, autocast(x), [*map(autocast, initial)], [*map(autocast, weights)])
    kernel, gradients = partial(_kernel, cell, len(initial)), partial(_gradients, cell, len(initial))
    out, *others = call_kernel(kernel, gradients, x, *initial, *weights, returned=len(initial))
    return out, out[-1], *others


def unrolled(cell: Cell, x: Tensor, initial: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run a recurrence operation by operation: with any cell, under any transforms.

    Args:
        cell: one step.
        x: the inputs, ``[T, N, I]``.
        initial: the state before the first step, ``[1, N, H]`` each.
        weights: W ``[G, I]`` and W' ``[G, H]``, b and b' ``[G]`` if there are biases.

    Returns:
        The outputs of all steps, ``[T, N, H]``, and the state after the last step, ``[N, H]`` each.
    """
    w_ih, w_hh, *biases = weights
    b_ih, b_hh = biases or (None, None)

    def step(state: Sequence[Tensor], row: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        after = one_step(cell, row[0], F.linear(state[0], w_hh, b_hh), *state)
        return after, after[:1]

    last, (outs,) = repeated(step, [autocast(s[0]) for s in initial], [F.linear(x, w_ih, b_ih)])
    return outs, *last


def _kernel(cell: Cell, size: int, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs, the last state but for h, and what the gradients need: all states before, and what was kept."""
    lead = *x.shape[:-3], x.shape[-2]
    initial = [_folded(s)[0] for s in others[:size]]
    w_ih, w_hh, *biases = [w[(0,) * (x.ndim - 3)] for w in others[size:]]  # all samples have the same ones
    if cell.at_inputs is None and biases:
        biases = [biases[0] + biases[1]]

    def step(state: Sequence[Tensor], row: Sequence[Tensor], weight: Tensor, *bias: Tensor) -> Any:
        if cell.at_inputs is None:
            after, kept = cell.step(torch.addmm(row[0], state[0], weight), *state)
        else:
            products = torch.addmm(*bias, state[0], weight) if bias else state[0] @ weight
            after, kept = cell.step(row[0], products, *state)
        return after, (*state, *kept)

    last, kept = looped(step, initial, [F.linear(_folded(x), w_ih, *biases[:1])], w_hh.T, *biases[1:])
    out = torch.cat([kept[0][1:], last[0][None]])
    return _unfolded(out, lead), *(s.unflatten(0, lead) for s in last[1:]), *(_unfolded(k, lead) for k in kept)


def _gradients(cell: Cell, size: int, needed: Sequence[bool], grad: Tensor | None, *others: Any) -> tuple[Any, ...]:
    """Return the gradients of the arguments of the kernel."""
    given = iter(others)
    grads = [grad, *itertools.islice(given, size - 1)]
    x, *initial = itertools.islice(given, size + 1)
    weights = list(itertools.islice(given, len(needed) - size - 1))
    kept = list(given)
    w_ih, w_hh = (w[(0,) * (x.ndim - 3)] for w in weights[:2])
    width = len(w_hh)
    lead = *x.shape[:-3], x.shape[-2]
    states = [_folded(k) for k in kept]
    own = torch.zeros_like(states[0]) if grad is None else _folded(grad)
    later = [own[-1], *(torch.zeros_like(own[0]) if g is None else g.flatten(0, -2) for g in grads[1:])]

    def step(later: Sequence[Tensor], row: Sequence[Tensor], weight: Tensor) -> Any:
        signals, (first, *rest) = cell.back(row[0], *later, *row[1:])
        at_products = signals if cell.at_inputs is None else signals[:, :width]
        return (torch.addmm(first, at_products, weight), *rest), (signals,)

    earlier = torch.cat([torch.zeros_like(own[:1]), own[:-1]])  # the initial state has no gradient of its own
    first, (signals,) = looped(step, later, [earlier, *cell.derivatives(*states)], w_hh, reverse=True)
    at_inputs = signals if cell.at_inputs is None else cell.at_inputs(signals)
    of_x = _unfolded(at_inputs @ w_ih, lead) if needed[0] else None
    at_inputs, at_products = _unfolded(at_inputs, lead), _unfolded(signals[..., :width], lead)
    products = Product(at_inputs, x), Product(at_products, kept[0])
    biases = [y.sum((-3, -2)) for y in (at_inputs, at_products)] if len(weights) > 2 else []
    return of_x, *(_unfolded(g[None], lead) for g in first), *products, *biases


def _folded(x: Tensor) -> Tensor:
    """Return ``[T, M, ·]`` from ``[*samples, T, N, ·]``: the sequences of all samples are rows of one axis."""
    return x.movedim(-3, 0).flatten(1, -2)


def _unfolded(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    return x.unflatten(1, lead).movedim(0, len(lead) - 1)
