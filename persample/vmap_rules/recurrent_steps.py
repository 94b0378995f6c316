"""The cells of recurrent layers, a step forward and a step back, and loops over time, also of a compiled program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from persample._torch import scan
from persample.utils.tracing import current_trace

_sigmoid_backward = torch.ops.aten.sigmoid_backward.default  # (grad, σ) → grad · σ(1 − σ)
_tanh_backward = torch.ops.aten.tanh_backward.default


class Cell(NamedTuple):
    """A cell h' = f(x, a, h, ...), elementwise: x are the gates of an input, a those of the state h."""

    # (x, a, *state) → the next state, and what ``derivatives`` needs of this step; (x + a, *state) if x and a are only
    # read as their sum
    step: Callable[..., tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]
    # (*states before each step, *what the steps kept), ``[T, N, ·]`` → derivatives, ``[T, N, ...]``
    derivatives: Callable[..., tuple[Tensor, ...]]
    # (the own gradient of the h before a step, the gradients of the state after it, *its derivatives) → the signals at
    # the gates, those of a first; the gradients of the state before, without what a passes on to h
    back: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    at_inputs: Callable[[Tensor], Tensor] | None = None  # all signals → those of x; None if only x + a is read


def one_step(cell: Cell, x: Tensor, a: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    """Return the state after one step; x are the gates of the input, a those of the first tensor of the state."""
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
    by_n = _tanh_backward(1 - z, n)
    by_r, by_z = _sigmoid_backward(by_n * a_n, r), _sigmoid_backward(h - n, z)
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
    by_i, by_f, by_o = map(_sigmoid_backward, (g, c, out), (i, f, o))
    return torch.stack([by_i, by_f, _tanh_backward(i, g), by_o], -2), _tanh_backward(o, out), f


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
RNN_TANH = Cell(partial(_rnn, torch.tanh), lambda _, h: (_tanh_backward(torch.ones_like(h), h),), _rnn_back)
RNN_RELU = Cell(partial(_rnn, torch.relu), lambda _, h: (h,), lambda own, g, h: (torch.where(h <= 0, 0, g[0]), (own,)))


# (state, the row of each sequence, *shared) → the next state, and what is kept of the step
Step = Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]]
States = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
# Steps per turn of a program's loop. A turn costs about 10 µs at each call; a step, 0.4 s of compilation.
_UNROLLED = 5
# Up to so many steps there is no loop: Inductor calls the kernels of a program with a loop from Python, not from C++.
_WITHOUT_LOOP = 20


def repeated(
    step: Step, state: Sequence[Tensor], sequences: Sequence[Tensor], *shared: Tensor, reverse: bool = False
) -> States:
    """Run a recurrence over the rows of sequences ``[T, ...]``, under any transforms.

    Returns the last state, and what all steps kept, ``[T, ...]`` each, in the order of the rows.
    """
    rows = list(zip(*(x.unbind(0) for x in sequences), strict=True))
    kept = []
    for row in reversed(rows) if reverse else rows:
        state, of_step = step(state, row, *shared)
        kept.append(of_step)
    if reverse:
        kept.reverse()
    return tuple(state), tuple(torch.stack(column) for column in zip(*kept, strict=True))


def looped(
    step: Step,
    state: Sequence[Tensor],
    sequences: Sequence[Tensor],
    *shared: Tensor,
    reverse: bool = False,
    prepare: Callable[..., Sequence[Tensor]] = lambda *rows: rows,
) -> States:
    """Return what ``repeated`` returns, for tensors that no transform wraps; a trace records a loop.

    In reverse, ``prepare`` makes the rows that the steps receive, from a range of rows of the sequences.
    """
    run, whole = partial(repeated, step, reverse=reverse), _steps_in_turns(sequences)
    if not whole:
        return run(state, prepare(*sequences), *shared)
    blocks, others = [_blocks(x[:whole]) for x in sequences], [x[whole:] for x in sequences]

    def turn(state: Sequence[Tensor], row: Sequence[Tensor], *given: Tensor) -> States:
        rows = [x.index_select(0, row[0])[0] for x in given[: len(blocks)]]
        return run(state, prepare(*rows), *given[len(blocks) :])

    if reverse:
        state, rest = run(state, prepare(*others), *shared)
        # Loops go through their sequences forward. Each turn looks up its block, since flipped copies take longer.
        places = torch.arange(len(blocks[0]) - 1, -1, -1, device=blocks[0].device).unsqueeze(1)
        state, kept = _loop(turn, state, [places], (*blocks, *shared))
        kept = tuple(_blocks(x).flip(0).flatten(0, 1) for x in kept)
    else:
        state, kept = _loop(run, state, blocks, shared)
        state, rest = run(state, others, *shared)
    return tuple(state), tuple(map(torch.cat, zip(kept, rest, strict=True))) if rest else kept


def _steps_in_turns(sequences: Sequence[Tensor]) -> int:
    """Return the number of steps in whole turns of a program's loop; 0 if the steps run one after the other."""
    trace, length = current_trace(), len(sequences[0])
    is_compiled = trace is not None and trace.compiles
    return length // _UNROLLED * _UNROLLED if is_compiled and length > _WITHOUT_LOOP else 0


def _blocks(x: Tensor) -> Tensor:
    return x.unflatten(0, (-1, _UNROLLED))


def _loop(turn: Step, state: Sequence[Tensor], sequences: Sequence[Tensor], shared: Sequence[Tensor]) -> States:
    def body(*args: Tensor) -> list[Tensor]:
        groups = iter(args)
        before, rows = ([next(groups) for _ in group] for group in (state, sequences))
        after, kept = turn(before, rows, *groups)
        return [*map(_copied, after), *kept]

    results = scan(body, list(map(_copied, state)), sequences, tuple(shared))
    return tuple(results[: len(state)]), tuple(x.flatten(0, 1) for x in results[len(state) :])


def _copied(state: Tensor) -> Tensor:
    """Return a contiguous copy: a loop requires equal strides of all states, and Inductor that rows share no memory."""
    return state.clone(memory_format=torch.contiguous_format)
