"""Recurrences h_t = cell(W x_t + b, W' h_{t-1} + b', h_{t-1}), unrolled or as a scan.

Under vmap and vjp every operation of an unrolled step passes through all levels of torch.func, and every use of a
weight makes one more gradient of its size per sample. A scan runs the steps of all samples on plain tensors, and uses
each weight once: in the backward pass it scans the steps in reverse, and then the signals of all steps are multiplied
with what the weights were applied to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample.utils.dtypes import autocast, full_precision, is_autocast
from persample.utils.tracing import is_for_compiler
from persample.vmap_rules.batched import is_batched
from persample.vmap_rules.kernel_call import call_kernel
from persample.vmap_rules.loops import looped, looped_back, repeated
from persample.vmap_rules.recurrent_cells import Cell, one_step

# (cell, inputs, initial state, weights) → outputs and the last state, as ``unrolled``
Recurrence = Callable[..., tuple[Tensor, ...]]


def scan(cell: Cell, x: Tensor, initial: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run a recurrence as a scan, for a loss that is differentiated once; see ``unrolled``."""
    if len(weights) % 2 or any(map(is_batched, weights)):
        return unrolled(cell, x, initial, weights)
    if is_autocast(x.device):  # tensors are cast here: torch.func differentiates no kernel under autocast
        with full_precision(x.device):
            return scan(cell, autocast(x), [*map(autocast, initial)], [*map(autocast, weights)])
    w_ih, w_hh, *biases = weights
    size, unneeded = len(initial), [*initial, *biases]
    kernel, gradients = partial(scan_kernel, cell, size), partial(_gradients, cell, size)
    tensors = [*unneeded, x, w_ih, w_hh]
    out, *others = call_kernel(kernel, gradients, *tensors, unneeded=len(unneeded), returned=size)
    return out, out[-1], *others


def unrolled(
    cell: Cell,
    x: Tensor,
    initial: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    linear: Callable[..., Tensor] = F.linear,
) -> tuple[Tensor, ...]:
    """Run a recurrence operation by operation: with any cell, under any transforms.

    Args:
        cell: one step.
        x: the inputs, ``[T, N, I]``.
        initial: the state before the first step, ``[1, N, H]`` each.
        weights: W ``[G, I]`` and W' ``[G, H]``, b and b' ``[G]`` if there are biases, and the matrix ``[P, H]`` that
            projects the state if there is one: then a step is not elementwise, and P stands for H elsewhere.
        linear: computes products with the weights, as ``F.linear``.

    Returns:
        The outputs of all steps, ``[T, N, H]``, and the state after the last step, ``[N, H]`` each.
    """
    if len(weights) % 2:
        *weights, projection = weights
        cell = _projected(cell, projection, linear)
    w_ih, w_hh, *biases = weights
    b_ih, b_hh = biases or (None, None)

    def step(state: Sequence[Tensor], row: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        after = one_step(cell, row[0], linear(state[0], w_hh, b_hh), *state)
        return after, after[:1]

    last, (outs,) = repeated(step, [autocast(s[0]) for s in initial], [linear(x, w_ih, b_ih)])
    return outs, *last


def _projected(cell: Cell, weight: Tensor, linear: Callable[..., Tensor]) -> Cell:
    def step(*args: Tensor) -> Any:
        (h, *others), kept = cell.step(*args)
        return (linear(h, weight), *others), kept

    return Cell(step, *cell[1:])


def scan_kernel(cell: Cell, size: int, *args: Tensor) -> tuple[Tensor, ...]:
    """Compute all steps.

    Args:
        cell: one step.
        size: the number of tensors of the state.
        *args: the initial state, the biases if there are any, the inputs, and the weights.

    Returns:
        The outputs, the rest of the last state, and of each step the state before it and what the cell kept.
    """
    initial, (*biases, x, w_ih, w_hh) = args[:size], args[size:]
    *biases, w_ih, w_hh = (w[(0,) * (x.ndim - 3)] for w in (*biases, w_ih, w_hh))  # all samples share them
    if cell.at_inputs is None and biases:
        biases = [biases[0] + biases[1]]

    def step(state: Sequence[Tensor], row: Sequence[Tensor], weight: Tensor, *bias: Tensor) -> Any:
        if cell.at_inputs is None:
            after, kept = cell.step(torch.addmm(row[0], state[0], weight), *state)
        else:
            products = torch.addmm(bias[0], state[0], weight) if bias else state[0] @ weight
            after, kept = cell.step(row[0], products, *state)
        return after, (*state, *kept)

    gates = F.linear(_folded(x).flatten(0, 1), w_ih, *biases[:1]).unflatten(0, (x.shape[-3], -1))
    last, kept = looped(step, [_folded(s)[0] for s in initial], [gates], w_hh.T, *biases[1:])
    out, axes = torch.cat([kept[0][1:], last[0][None]]), _axes(x)
    return _unfolded(out, axes), *(s.unflatten(0, axes) for s in last[1:]), *(_unfolded(k, axes) for k in kept)


def _gradients(cell: Cell, size: int, needed: Sequence[bool], *args: Any) -> tuple[Any, ...]:
    """Compute the gradients of the arguments of ``scan_kernel`` from those of its first results."""
    grads, (x, w_ih, w_hh, *kept) = args[:size], args[size:]
    of_state, of_x, signals = scan_signals(cell, grads, w_ih, w_hh, kept, needs_x=needed[-3])
    biases = [y.sum((-3, -2)) for y in signals[: len(needed) - size - 3]]
    products = [y.flatten(-3, -2).mT @ z.flatten(-3, -2) for y, z in zip(signals, (x, kept[0]), strict=True)]
    return *of_state, *biases, of_x, *products


def scan_signals(
    cell: Cell, grads: Sequence[Tensor | None], w_ih: Tensor, w_hh: Tensor, kept: Sequence[Tensor], *, needs_x: bool
) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
    """Compute the signals at the gates, by a scan of the steps in reverse.

    Args:
        cell: one step.
        grads: the gradients of the outputs and of the rest of the last state, or None.
        w_ih: W, one for all samples: ``[*samples, G, I]``.
        w_hh: W', likewise.
        kept: what ``scan_kernel`` kept.
        needs_x: whether the inputs need a gradient.

    Returns:
        The gradients of the initial state, that of the inputs or None, and the signals at the gates of the inputs and
        at those of the state, ``[*samples, T, N, G]``.
    """
    grad, *others = grads
    w_ih, w_hh = (w[(0,) * (kept[0].ndim - 3)] for w in (w_ih, w_hh))
    width, axes = len(w_hh), _axes(kept[0])
    states = [_folded(k) for k in kept]
    own = torch.zeros_like(states[0]) if grad is None else _folded(grad)
    earlier = torch.cat([torch.zeros_like(own[:1]), own[:-1]])  # the initial state has no gradient of its own
    later = [own[-1], *(torch.zeros_like(own[0]) if g is None else g.reshape(-1, g.shape[-1]) for g in others)]

    def prepare(earlier: Tensor, *states: Tensor) -> Sequence[Tensor]:
        return earlier, *cell.derivatives(*states)

    def step(later: Sequence[Tensor], row: Sequence[Tensor], weight: Tensor) -> Any:
        signals, (first, *rest) = cell.back(row[0], later, *row[1:])
        at_products = signals if cell.at_inputs is None else signals[:, :width]
        return (torch.addmm(first, at_products, weight), *rest), (signals,)

    first, (signals,) = looped_back(step, later, [earlier, *states], w_hh, prepare=prepare)
    at_inputs = signals if cell.at_inputs is None else cell.at_inputs(signals)
    of_x = _unfolded(at_inputs @ w_ih, axes) if needs_x else None
    if cell.at_inputs is None:  # both weights have the same signals: eager code copies them here, not once for each
        shared = _unfolded(signals, axes)
        both = [shared if is_for_compiler(shared) else shared.contiguous()] * 2
    else:
        both = [_unfolded(y, axes) for y in (at_inputs, signals[..., :width])]
    return [_unfolded(g[None], axes) for g in first], of_x, both


def _axes(x: Tensor) -> tuple[int, ...]:
    return *x.shape[:-3], x.shape[-2]


def _folded(x: Tensor) -> Tensor:
    """Return ``[T, M, ·]`` from ``[*samples, T, N, ·]``: the sequences of all samples are rows of one axis."""
    return x.movedim(-3, 0).reshape(x.shape[-3], -1, x.shape[-1])  # batched backward passes have no rule of flatten


def _unfolded(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return x.reshape(len(x), *axes, x.shape[-1]).movedim(0, len(axes) - 1)
