"""``nn.GRU``, ``nn.LSTM``, ``nn.RNN`` and their cells as matrix products and elementwise steps; ``nn.utils.rnn``.

Sequences are padded, packed and unpacked by indices that all samples share.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample._torch import cudnn_rnn_flatten_weight, pack_padded_sequence, pad_packed_sequence, pad_sequence
from persample.utils.dtypes import autocast
from persample.vmap_rules.batched import is_batched
from persample.vmap_rules.recurrent_cells import GRU, LSTM, RNN_RELU, RNN_TANH, Cell, one_step
from persample.vmap_rules.recurrent_scan import Recurrence, scan, unrolled

# (inputs [T, N, I], initial states [1, N, H], weights) → outputs [T, N, H], last states [N, H]
_Layer = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]


def _one_step(  # noqa: PLR0917 - as torch's
    step: Callable[..., Any],
    cell: Cell,
    x: Tensor,
    state: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    *,
    linear: Callable[..., Tensor] = F.linear,
) -> Any:
    states: Sequence[Tensor] = _as_tuple(state)
    if x.ndim != 2 or {s.shape for s in states} != {(len(x), w_hh.shape[1])}:
        return step(x, state, w_ih, w_hh, b_ih, b_hh)  # raises
    gates = linear(x, w_ih, b_ih)
    states = [*map(autocast, states)]
    after = one_step(cell, *_of_one_dtype(gates, linear(states[0], w_hh, b_hh), *states))
    return after if len(after) > 1 else after[0]


def _of_one_dtype(*tensors: Tensor) -> Sequence[Tensor]:
    """Return tensors in the widest of their dtypes, in which torch's cells compute."""
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    return [x.to(dtype) for x in tensors]


def _sequence(layer: _Layer, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    if isinstance(args[2], list | tuple):  # a packed sequence: the weights come third, after the sizes and the state
        return _packed(layer, x, *args)
    *args, batch_first = args  # type: ignore[assignment]
    out, *finals = _stack(layer, x.transpose(0, 1) if batch_first else x, *args)
    return out.transpose(0, 1) if batch_first else out, *finals


def _packed(layer: _Layer, data: Tensor, batch_sizes: Tensor, state: Any, *args: Any) -> tuple[Tensor, ...]:
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


def _stack(  # noqa: PLR0917 - as torch's
    layer: _Layer,
    x: Tensor,
    state: Any,
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


def _as_tuple(state: Any) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else tuple(state)


def recurrent_rule(function: Any, recurrence: Recurrence, linear: Callable[..., Tensor]) -> Callable[..., Any] | None:
    """Return the rule of a function of torch, or None if it is not recurrent.

    Args:
        function: what ``nn.GRU``, ``nn.GRUCell`` and their like call.
        recurrence: runs one layer.
        linear: computes the gates of one step of a cell, as ``F.linear``.
    """
    if function in _SEQUENCES:
        return functools.partial(_sequence, functools.partial(recurrence, _SEQUENCES[function]))
    return functools.partial(_one_step, function, _STEPS[function], linear=linear) if function in _STEPS else None


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


_SEQUENCES = {torch.gru: GRU, torch.lstm: LSTM, torch.rnn_tanh: RNN_TANH, torch.rnn_relu: RNN_RELU}
_STEPS = {
    torch.gru_cell: GRU,
    torch.lstm_cell: LSTM,
    torch.rnn_tanh_cell: RNN_TANH,
    torch.rnn_relu_cell: RNN_RELU,
}
RULES: dict[Any, Any] = {
    **{function: recurrent_rule(function, unrolled, F.linear) for function in (*_STEPS, *_SEQUENCES)},
    pad_sequence: _pad,
    pack_padded_sequence: _pack,
    pad_packed_sequence: _unpack,
    cudnn_rnn_flatten_weight: lambda *_: None,  # no kernel of cuDNN's is called, and parameters stay where they are
}
FIRST_DERIVATIVE_RULES: dict[Any, Any] = {function: recurrent_rule(function, scan, F.linear) for function in _SEQUENCES}
