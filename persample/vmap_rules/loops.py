"""Loops over time: one step after another, or as a loop of a compiled program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def looped(
    step: Step,
    state: Sequence[Tensor],
    sequences: Sequence[Tensor],
    *shared: Any,
    prepare: Callable[..., Sequence[Tensor]] | None = None,
    reverse: bool = False,
) -> States:
    """Return what ``repeated`` returns, for tensors that no transform wraps; a trace records a loop.

    Args:
        step: one step.
        state: the state before the first step.
        sequences: tensors ``[T, ...]``.
        *shared: further arguments of all steps.
        prepare: from the sequences, or a range of their rows, to those whose rows the steps are given.
        reverse: whether the steps run from the last row to the first.
    """
    whole = len(sequences[0]) // _UNROLLED * _UNROLLED

    def run(state: Sequence[Tensor], rows: Sequence[Tensor], *shared: Any, reverse: bool = False) -> States:
        return repeated(step, state, rows if prepare is None else prepare(*rows), *shared, reverse=reverse)

    if current_trace() is None or whole <= _UNROLLED:
        return run(state, sequences, *shared, reverse=reverse)
    if reverse:
        flipped = [x.flip(0) for x in sequences]
        last, kept = looped(step, state, flipped, *shared, prepare=prepare)
        return last, tuple(x.flip(0) for x in kept)

    def turn(*args: Any) -> list[Tensor]:  # of the loop: ``_UNROLLED`` steps
        groups = iter(args)
        before, rows = ([next(groups) for _ in group] for group in (state, sequences))
        after, kept = run(before, rows, *groups)
        return [*map(_copied, after), *kept]

    blocks = [x[:whole].unflatten(0, (-1, _UNROLLED)) for x in sequences]
    results = scan(turn, list(map(_copied, state)), blocks, shared)
    last, states = tuple(results[: len(state)]), tuple(x.flatten(0, 1) for x in results[len(state) :])
    if whole == len(sequences[0]):
        return last, states
    last, rest = run(last, [x[whole:] for x in sequences], *shared)
    return last, tuple(torch.cat(parts) for parts in zip(states, rest, strict=True))


def _copied(state: Tensor) -> Tensor:
    """Return a contiguous copy: a loop requires equal strides of all states, and Inductor that rows share no memory."""
    return state.clone(memory_format=torch.contiguous_format)
