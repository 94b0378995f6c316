"""The cells of recurrent layers: one step forward, and one step back by derivatives computed for many steps at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from persample._torch import aten_sigmoid_backward, aten_tanh_backward


class Cell(NamedTuple):
    """A cell h' = f(x, a, h, ...), elementwise: x are the gates of an input, a those of the state h.

    Args:
        step: (x, a, *state) → the next state, and what ``derivatives`` needs of this step; (x + a, *state) if x and a
            are only read as their sum.
        derivatives: (*states before each step, *what the steps kept), ``[T, N, ·]`` → derivatives, ``[T, N, ...]``.
        back: (the own gradient of the h before a step, the gradients of the state after it, *its derivatives) → the
            signals at the gates, those of a first; the gradients of the state before, without what a passes on to h.
        at_inputs: all signals at the gates → those of x; None if x and a are only read as their sum.
    """

    step: Callable[..., tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]
    derivatives: Callable[..., tuple[Tensor, ...]]
    back: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    at_inputs: Callable[[Tensor], Tensor] | None = None


def one_step(cell: Cell, x: Tensor, a: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    """Return the state after one step.

    Args:
        cell: the cell.
        x: the gates of the input.
        a: the gates of the first tensor of the state.
        *state: the state before.
    """
    after, _ = cell.step(x + a, *state) if cell.at_inputs is None else cell.step(x, a, *state)
    return after


def _gru(x: Tensor, a: Tensor, h: Tensor) -> tuple[tuple[Tensor], tuple[Tensor, ...]]:
    sizes = [2 * h.shape[-1], h.shape[-1]]
    (x_rz, x_n), (a_rz, a_n) = x.split(sizes, -1), a.split(sizes, -1)
    rz = torch.sigmoid(x_rz + a_rz)
    r, z = rz.chunk(2, -1)
    n = torch.tanh(torch.addcmul(x_n, r, a_n))
    return (torch.lerp(n, h, z),), (rz, n, a_n)


def _gru_derivatives(h: Tensor, rz: Tensor, n: Tensor, a_n: Tensor) -> tuple[Tensor, ...]:
    r, z = rz.chunk(2, -1)
    by_n = aten_tanh_backward(1 - z, n)
    by_r, by_z = aten_sigmoid_backward(by_n * a_n, r), aten_sigmoid_backward(h - n, z)
    return torch.stack([by_r, by_z, by_n * r, by_n], -2), z


def _gru_back(own: Tensor, later: Sequence[Tensor], by_gates: Tensor, z: Tensor) -> tuple[Tensor, tuple[Tensor]]:
    (g,) = later
    return (by_gates * g.unsqueeze(-2)).reshape(len(g), -1), (torch.addcmul(own, g, z),)


def _gru_at_inputs(signals: Tensor) -> Tensor:
    r, z, _, n = signals.chunk(4, -1)
    return torch.cat([r, z, n], -1)


def _lstm(gates: Tensor, _h: Tensor, c: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    ifgo, g = torch.sigmoid(gates), torch.tanh(gates.chunk(4, -1)[2])  # one operation for all gates is the fastest
    i, f, _, o = ifgo.chunk(4, -1)
    c = torch.addcmul(f * c, i, g)
    out = torch.tanh(c)
    return (o * out, c), (ifgo, g, out)


def _lstm_derivatives(_h: Tensor, c: Tensor, ifgo: Tensor, g: Tensor, out: Tensor) -> tuple[Tensor, ...]:
    i, f, _, o = ifgo.chunk(4, -1)
    by_i, by_f, by_o = map(aten_sigmoid_backward, (g, c, out), (i, f, o))
    return torch.stack([by_i, by_f, aten_tanh_backward(i, g), by_o], -2), aten_tanh_backward(o, out), f


def _lstm_back(
    own: Tensor, later: Sequence[Tensor], by_gates: Tensor, by_c: Tensor, f: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    g_h, g_c = later
    g_c = torch.addcmul(g_c, g_h, by_c)
    return (by_gates * torch.stack([g_c, g_c, g_c, g_h], -2)).reshape(len(g_c), -1), (own, g_c * f)


def _rnn(activation: Callable[[Tensor], Tensor], gates: Tensor, _h: Tensor) -> tuple[tuple[Tensor], tuple[Tensor]]:
    h = activation(gates)
    return (h,), (h,)


def _rnn_back(own: Tensor, later: Sequence[Tensor], by_gates: Tensor) -> tuple[Tensor, tuple[Tensor]]:
    return later[0] * by_gates, (own,)


GRU = Cell(_gru, _gru_derivatives, _gru_back, _gru_at_inputs)
LSTM = Cell(_lstm, _lstm_derivatives, _lstm_back)
RNN_TANH = Cell(
    functools.partial(_rnn, torch.tanh), lambda _, h: (aten_tanh_backward(torch.ones_like(h), h),), _rnn_back
)
RNN_RELU = Cell(
    functools.partial(_rnn, torch.relu), lambda _, h: (h,), lambda own, g, h: (torch.where(h <= 0, 0, g[0]), (own,))
)
