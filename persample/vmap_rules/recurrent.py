"""``nn.GRU``, ``nn.LSTM``, ``nn.RNN`` and their cells as matrix products and elementwise steps; ``nn.utils.rnn``.

A recurrence h_t = cell(W x_t + b, W' h_{t-1} + b', h_{t-1}) is unrolled, or a scan. Under vmap and vjp every operation
of an unrolled step passes through all levels of torch.func, and every use of a weight makes one more gradient of its
size per sample. A scan runs the steps of all samples on plain tensors, and uses each weight once: in the backward pass
it scans the steps in reverse, and then the signals of all steps are multiplied with what the weights were applied to.

Sequences are padded, packed and unpacked by indices that all samples share.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from persample._torch import cudnn_rnn_flatten_weight, pack_padded_sequence, pad_packed_sequence, pad_sequence
from persample.utils.numerics import autocast, is_autocast, precast
from persample.utils.tracing import is_batched, is_for_compiler
from persample.utils.trees import Leaf
from persample.vmap_rules.levels import Function, Rules, call_kernel
from persample.vmap_rules.recurrent_steps import GRU, LSTM, RNN_RELU, RNN_TANH, Cell, States, looped, one_step, repeated

# Runs one layer, as ``unrolled`` does, of a cell; or, of the functions below, of the arguments behind the cell.
_Recurrence: TypeAlias = Callable[..., tuple[Tensor, ...]]
_State: TypeAlias = Tensor | Sequence[Tensor]


def scan(cell: Cell, x: Tensor, initial: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run a recurrence as a scan, for a loss that is differentiated once; see ``unrolled``."""
    if len(weights) % 2 or any(map(is_batched, weights)):
        return unrolled(cell, x, initial, weights)
    if is_autocast(x.device):
        return precast(autocast, x.device, partial(scan, cell), x, [*initial], [*weights])
    w_ih, w_hh, *biases = weights
    size, unneeded = len(initial), [*initial, *biases]
    kernel, gradients = partial(scan_kernel, cell, size), partial(_gradients, cell, size)
    tensors = [*unneeded, x, w_ih, w_hh]
    out, *others = call_kernel(kernel, gradients, *tensors, unneeded=len(unneeded), returned=size, reads_returned=False)
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

    Inputs are ``[T, N, I]``, the state before the first step ``[1, N, H]`` each; the weights W ``[G, I]`` and W' ``[G,
    H]``, b and b' ``[G]`` if there are biases, and the matrix ``[P, H]`` that projects the state if there is one: then
    a step is not elementwise, and P takes the place of H elsewhere. ``linear`` computes products as ``F.linear``.
    Returns the outputs of all steps, ``[T, N, H]``, and the state after the last step, ``[N, H]`` each.
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
    def step(*args: Tensor) -> States:
        (h, *others), kept = cell.step(*args)
        return (linear(h, weight), *others), kept

    return Cell(step, *cell[1:])


def scan_kernel(cell: Cell, size: int, *args: Tensor) -> tuple[Tensor, ...]:
    """Compute all steps from the ``size`` tensors of the initial state, the biases if any, the inputs, and the weights.

    Returns the outputs, the rest of the last state, and of each step the state before it and what the cell kept.
    """
    initial, (*biases, x, w_ih, w_hh) = args[:size], args[size:]
    *biases, w_ih, w_hh = (w[(0,) * (x.ndim - 3)] for w in (*biases, w_ih, w_hh))  # all samples share them
    if cell.at_inputs is None and biases:
        biases = [biases[0] + biases[1]]

    def step(state: Sequence[Tensor], row: Sequence[Tensor], weight: Tensor, *bias: Tensor) -> States:
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


def _gradients(cell: Cell, size: int, needed: Sequence[bool], *args: Tensor) -> tuple[Tensor | None, ...]:
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

    ``grads`` are the gradients of the outputs and of the rest of the last state, or None; W and W' have one matrix for
    all samples, ``[*samples, G, I]``; ``kept`` is what ``scan_kernel`` kept. Returns the gradients of the initial
    state, that of the inputs or None, and the signals at the gates of the inputs and of the state, ``[*samples, T, N,
    G]``.
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

    def step(later: Sequence[Tensor], row: Sequence[Tensor], weight: Tensor) -> States:
        signals, (first, *rest) = cell.back(row[0], later, *row[1:])
        at_products = signals if cell.at_inputs is None else signals[:, :width]
        return (torch.addmm(first, at_products, weight), *rest), (signals,)

    first, (signals,) = looped(step, later, [earlier, *states], w_hh, reverse=True, prepare=prepare)
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


def _one_step(
    step: Function,
    cell: Cell,
    x: Tensor,
    state: _State,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    *,
    linear: Callable[..., Tensor] = F.linear,
) -> _State:
    states: Sequence[Tensor] = _as_tuple(state)
    if x.ndim != 2 or {s.shape for s in states} != {(len(x), w_hh.shape[1])}:
        return step(x, state, w_ih, w_hh, b_ih, b_hh)  # raises
    states = [*map(autocast, states)]
    tensors = linear(x, w_ih, b_ih), linear(states[0], w_hh, b_hh), *states
    dtype = reduce(torch.promote_types, (y.dtype for y in tensors))  # in which torch's cells compute
    after = one_step(cell, *(y.to(dtype) for y in tensors))
    return after if len(after) > 1 else after[0]


def _sequence(layer: _Recurrence, x: Tensor, *args: Leaf) -> tuple[Tensor, ...]:
    if isinstance(args[2], list | tuple):  # a packed sequence: the weights come third, after the sizes and the state
        return _packed(layer, x, *args)
    *args, batch_first = args  # type: ignore[assignment]
    out, *finals = _stack(layer, x.transpose(0, 1) if batch_first else x, *args)
    return out.transpose(0, 1) if batch_first else out, *finals


def _packed(layer: _Recurrence, data: Tensor, batch_sizes: Tensor, state: _State, *args: Leaf) -> tuple[Tensor, ...]:
    sizes = batch_sizes.tolist()
    starts = batch_sizes.cumsum(0) - batch_sizes
    lengths = [sum(size > n for size in sizes) for n in range(sizes[0])]
    places, results = [], []
    for length, group in itertools.groupby(range(sizes[0]), lengths.__getitem__):  # sequences of one length at a time
        members = torch.tensor(list(group), device=starts.device)
        rows = starts[:length, None] + members
        initial = [x[:, members] for x in _as_tuple(state)]
        out, *finals = _stack(layer, data[rows], initial, *args)
        places.append(rows.flatten())
        results.append((out.flatten(0, 1), *finals))
    outs, *ends = zip(*results, strict=True)
    return torch.cat(outs)[torch.cat(places).argsort()], *(torch.cat(x, 1) for x in ends)


def _stack(
    layer: _Recurrence,
    x: Tensor,
    state: _State,
    weights: Sequence[Tensor],
    _has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    passes = num_layers * (1 + bidirectional)
    size = len(weights) // passes
    outs: list[Tensor] = []
    finals = []
    for k in range(passes):
        backwards = bidirectional and k % 2
        if k and not backwards:
            x, outs = F.dropout(torch.cat(outs, -1), dropout, train), []
        initial = [s[k : k + 1] for s in _as_tuple(state)]
        out, *last = layer(x.flip(0) if backwards else x, initial, weights[k * size : (k + 1) * size])
        outs.append(out.flip(0) if backwards else out)
        finals.append(last)
    return torch.cat(outs, -1), *(torch.stack(s) for s in zip(*finals, strict=True))


def _as_tuple(state: _State) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else tuple(state)


def recurrent_rule(
    function: Function, recurrence: _Recurrence, linear: Callable[..., Tensor] = F.linear
) -> Function | None:
    """Return the rule of what ``nn.GRU``, ``nn.GRUCell`` and their like call, or None for any other function.

    ``recurrence`` runs one layer; ``linear`` computes the gates of one step of a cell.
    """
    if function in _SEQUENCES:
        return partial(_sequence, partial(recurrence, _SEQUENCES[function]))
    return partial(_one_step, function, _STEPS[function], linear=linear) if function in _STEPS else None


def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Pack the indices of the rows, and look up the rows by these."""
    if is_batched(lengths):
        lengths.tolist()  # the result would have a shape of each sample's: vmap raises that it cannot read values
    x = x.transpose(0, 1) if batch_first else x
    indices = torch.arange(x.shape[0] * x.shape[1], device=x.device).view(*x.shape[:2], 1)
    indices, batch_sizes = pack_padded_sequence(indices, lengths, False)
    return x.flatten(0, 1)[indices.flatten()], batch_sizes


def _pad(
    sequences: Sequence[Tensor], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Tensor:
    gaps = [max(map(len, sequences)) - len(x) for x in sequences]
    sides = [(0, gap) if padding_side == "right" else (gap, 0) for gap in gaps]
    frames = [(*[0, 0] * (x.ndim - 1), *side) for x, side in zip(sequences, sides, strict=True)]
    padded = [F.pad(x, frame, value=padding_value) for x, frame in zip(sequences, frames, strict=True)]
    return torch.stack(padded, 0 if batch_first else 1)


def _unpack(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding: float, total_length: int
) -> tuple[Tensor, Tensor]:
    sequences = torch.arange(int(batch_sizes[0]), device=batch_sizes.device)
    is_element = sequences < batch_sizes[:, None]  # [T, N]: whether sequence n has an element t
    indices = torch.where(is_element, sequences + (batch_sizes.cumsum(0) - batch_sizes)[:, None], 0)
    missing = 0, 0, 0, total_length - len(is_element)
    indices, is_element = (F.pad(x, missing).to(data.device) for x in (indices, is_element))
    out = torch.where(is_element[(..., *[None] * (data.ndim - 1))], data[indices], padding)
    return out.transpose(0, 1) if batch_first else out, is_element.sum(0).cpu()


_SEQUENCES: dict[Function, Cell] = {
    torch.gru: GRU,
    torch.lstm: LSTM,
    torch.rnn_tanh: RNN_TANH,
    torch.rnn_relu: RNN_RELU,
}
_CELLS = torch.gru_cell, torch.lstm_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell
_STEPS: dict[Function, Cell] = dict(zip(_CELLS, _SEQUENCES.values(), strict=True))


RULES: Rules = {
    **{function: rule for function in (*_STEPS, *_SEQUENCES) if (rule := recurrent_rule(function, unrolled))},
    pad_sequence: _pad,
    pack_padded_sequence: _pack,
    pad_packed_sequence: _unpack,
    cudnn_rnn_flatten_weight: lambda *_: None,  # no kernel of cuDNN's is called, and parameters stay where they are,
}


FIRST_DERIVATIVE_RULES: Rules = {function: rule for function in _SEQUENCES if (rule := recurrent_rule(function, scan))}
