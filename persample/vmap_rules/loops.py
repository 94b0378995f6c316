"""Loops over time: one step after another, or as a loop of a compiled program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from persample._torch import scan
from persample.utils.tracing import current_trace

# (state, the row of each sequence, *shared) → the next state, and what is kept of the step
Step = Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]]
States = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
# Steps per turn of a program's loop. A turn costs about 10 µs at each call; a step, 0.4 s of compilation.
_UNROLLED = 5
# Up to so many steps there is no loop: Inductor calls the kernels of a program with a loop from Python, not from C++.
_WITHOUT_LOOP = 20


def repeated(
    step: Step, state: Sequence[Tensor], sequences: Sequence[Tensor], *shared: Any, reverse: bool = False
) -> States:
    """Run a recurrence, under any transforms.

    Args:
        step: one step.
        state: the state before the first step.
        sequences: tensors ``[T, ...]``.
        *shared: further arguments of all steps.
        reverse: whether the steps run from the last row to the first.

    Returns:
        The last state, and what all steps kept, ``[T, ...]`` each, in the order of the rows.
    """
    rows = list(zip(*(x.unbind(0) for x in sequences), strict=True))
    kept = []
    for row in reversed(rows) if reverse else rows:
        state, of_step = step(state, row, *shared)
        kept.append(of_step)
    if reverse:
        kept.reverse()
    return tuple(state), tuple(torch.stack(column) for column in zip(*kept, strict=True))


def looped(step: Step, state: Sequence[Tensor], sequences: Sequence[Tensor], *shared: Any) -> States:
    """Return what ``repeated`` returns, for tensors that no transform wraps; a trace records a loop.

    Args:
        step: one step.
        state: the state before the first step.
        sequences: tensors ``[T, ...]``.
        *shared: further arguments of all steps.
    """
    whole = _steps_in_turns(sequences)
    if not whole:
        return repeated(step, state, sequences, *shared)
    blocks, others = [_blocks(x[:whole]) for x in sequences], [x[whole:] for x in sequences]
    state, kept = _loop(partial(repeated, step), state, blocks, shared)
    state, rest = repeated(step, state, others, *shared)
    return state, _joined(kept, rest)


def looped_back(
    step: Step,
    state: Sequence[Tensor],
    sequences: Sequence[Tensor],
    *shared: Any,
    prepare: Callable[..., Sequence[Tensor]],
) -> States:
    """Run steps from the last row to the first, as ``looped`` does.

    Args:
        step: one step.
        state: the state before the step of the last row.
        sequences: tensors ``[T, ...]``.
        *shared: further arguments of all steps.
        prepare: from a range of rows of the sequences to those whose rows the steps are given.

    Returns:
        The last state, and what all steps kept, ``[T, ...]`` each, in the order of the rows.
    """
    whole = _steps_in_turns(sequences)
    if not whole:
        return repeated(step, state, prepare(*sequences), *shared, reverse=True)
    blocks, others = [_blocks(x[:whole]) for x in sequences], [x[whole:] for x in sequences]

    def turn(state: Sequence[Tensor], row: Sequence[Tensor], *given: Tensor) -> States:
        rows = [x.index_select(0, row[0])[0] for x in given[: len(blocks)]]
        return repeated(step, state, prepare(*rows), *given[len(blocks) :], reverse=True)

    state, rest = repeated(step, state, prepare(*others), *shared, reverse=True)
    # Loops go through their sequences forward. Each turn looks up its block, since flipped copies take longer.
    places = torch.arange(len(blocks[0]) - 1, -1, -1, device=blocks[0].device).unsqueeze(1)
    state, kept = _loop(turn, state, [places], (*blocks, *shared))
    return state, _joined([_blocks(x).flip(0).flatten(0, 1) for x in kept], rest)


def _steps_in_turns(sequences: Sequence[Tensor]) -> int:
    """Return the number of steps in whole turns of a program's loop; 0 if the steps run one after the other."""
    trace, length = current_trace(), len(sequences[0])
    is_compiled = trace is not None and trace.compiles
    return length // _UNROLLED * _UNROLLED if is_compiled and length > _WITHOUT_LOOP else 0


def _blocks(x: Tensor) -> Tensor:
    return x.unflatten(0, (-1, _UNROLLED))


def _loop(turn: Step, state: Sequence[Tensor], sequences: Sequence[Tensor], shared: Sequence[Any]) -> States:
    def body(*args: Any) -> list[Tensor]:
        groups = iter(args)
        before, rows = ([next(groups) for _ in group] for group in (state, sequences))
        after, kept = turn(before, rows, *groups)
        return [*map(_copied, after), *kept]

    results = scan(body, list(map(_copied, state)), sequences, tuple(shared))
    return tuple(results[: len(state)]), tuple(x.flatten(0, 1) for x in results[len(state) :])


def _joined(kept: Sequence[Tensor], rest: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(map(torch.cat, zip(kept, rest, strict=True))) if rest else tuple(kept)


def _copied(state: Tensor) -> Tensor:
    """Return a contiguous copy: a loop requires equal strides of all states, and Inductor that rows share no memory."""
    return state.clone(memory_format=torch.contiguous_format)
