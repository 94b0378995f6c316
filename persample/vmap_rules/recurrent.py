"""``nn.GRU``, ``nn.LSTM``, ``nn.RNN`` and their cells as matrix products and elementwise steps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample.utils.dtypes import is_autocast
from persample.vmap_rules.sweep import Cell, recur, unrolled


def _gru(x: Tensor, a: Tensor, h: Tensor) -> tuple[Tensor]:
    (xr, xz, xn), (ar, az, an) = x.chunk(3, -1), a.chunk(3, -1)
    r, z = torch.sigmoid(xr + ar), torch.sigmoid(xz + az)
    return (torch.lerp(torch.tanh(torch.addcmul(xn, r, an)), h, z),)


def _lstm(x: Tensor, a: Tensor, _h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (x + a).chunk(4, -1)
    c = torch.addcmul(torch.sigmoid(f) * c, torch.sigmoid(i), torch.tanh(g))
    return torch.sigmoid(o) * torch.tanh(c), c


def _rnn_tanh(x: Tensor, a: Tensor, _h: Tensor) -> tuple[Tensor]:
    return (torch.tanh(x + a),)


def _rnn_relu(x: Tensor, a: Tensor, _h: Tensor) -> tuple[Tensor]:
    return (torch.relu(x + a),)


def _projected(cell: Cell, weight: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
    h, *others = cell(*args)
    return F.linear(h, weight), *others


def _one_step(  # noqa: PLR0917 - as torch's
    step: Callable[..., Any],
    cell: Cell,
    x: Tensor,
    state: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    states: Sequence[Tensor] = _as_tuple(state)
    if x.ndim != 2 or {s.shape for s in states} != {(len(x), w_hh.shape[1])}:
        return step(x, state, w_ih, w_hh, b_ih, b_hh)  # raises
    gates = F.linear(x, w_ih, b_ih)
    states = _alike(states, gates)
    after = cell(*_of_one_dtype(gates, F.linear(states[0], w_hh, b_hh), *states))
    return after if len(after) > 1 else after[0]


def _of_one_dtype(*tensors: Tensor) -> Sequence[Tensor]:
    # As torch's cells compute, in the widest.
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    return [x.to(dtype) for x in tensors]


def _sequence(cell: Cell, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    if isinstance(args[2], list | tuple):  # the weights, in third place only behind the sizes of a packed sequence
        return _packed(cell, x, *args)
    *args, batch_first = args  # type: ignore[assignment]
    out, *finals = _stack(cell, x.transpose(0, 1) if batch_first else x, *args)
    return out.transpose(0, 1) if batch_first else out, *finals


def _packed(cell: Cell, data: Tensor, batch_sizes: Tensor, state: Any, *args: Any) -> tuple[Tensor, ...]:
    sizes = batch_sizes.tolist()
    starts = batch_sizes.cumsum(0) - batch_sizes
    lengths = [sum(size > n for size in sizes) for n in range(sizes[0])]
    places, results = [], []
    for length, group in itertools.groupby(range(sizes[0]), lengths.__getitem__):  # sequences of one length at a time
        members = torch.tensor(list(group))
        rows = starts[:length, None] + members
        initial = [x[:, members] for x in _as_tuple(state)]
        out, *finals = _stack(cell, data[rows], initial, *args)
        places.append(rows.flatten())
        results.append((out.flatten(0, 1), *finals))
    outs, *ends = zip(*results, strict=True)
    return torch.cat(outs)[torch.cat(places).argsort()], *(torch.cat(x, 1) for x in ends)


def _stack(  # noqa: PLR0917 - as torch's
    cell: Cell,
    x: Tensor,
    state: Any,
    weights: Sequence[Tensor],
    has_biases: bool,
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
        states = _layer(cell, x.flip(0) if backwards else x, initial, weights[k * size : (k + 1) * size], has_biases)
        outs.append(states[0].flip(0) if backwards else states[0])
        finals.append([s[-1] for s in states])
    return torch.cat(outs, -1), *(torch.stack(s) for s in zip(*finals, strict=True))


def _layer(
    cell: Cell, x: Tensor, initial: Sequence[Tensor], weights: Sequence[Tensor], has_biases: bool
) -> tuple[Tensor, ...]:
    w_ih, w_hh, *rest = weights
    b_ih, b_hh = rest[:2] if has_biases else (None, None)
    gates = F.linear(x, w_ih, b_ih)
    initial = _alike(initial, gates)
    if len(rest) % 2:  # a projection of the state, with which a step is not elementwise
        return unrolled(functools.partial(_projected, cell, rest[-1]), gates, w_hh, b_hh, *initial)
    return recur(cell, gates, w_hh, b_hh, *initial)


def _alike(states: Sequence[Tensor], gates: Tensor) -> Sequence[Tensor]:
    return [s.to(gates.dtype) for s in states] if is_autocast(gates.device) else states


def _as_tuple(state: Any) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else tuple(state)


_CELLS: dict[Any, tuple[Any, Cell]] = {
    torch.gru: (torch.gru_cell, _gru),
    torch.lstm: (torch.lstm_cell, _lstm),
    torch.rnn_tanh: (torch.rnn_tanh_cell, _rnn_tanh),
    torch.rnn_relu: (torch.rnn_relu_cell, _rnn_relu),
}
RECURRENT: dict[Any, Callable[..., Any]] = {
    **{layers: functools.partial(_sequence, cell) for layers, (_, cell) in _CELLS.items()},
    **{step: functools.partial(_one_step, step, cell) for step, cell in _CELLS.values()},
}
