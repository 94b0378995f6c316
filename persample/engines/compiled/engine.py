"""The compiled engine: the eager one, traced once to a flat graph, and that as compiled code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from persample._torch import peek_interpreter_stack
from persample.engines.compiled.cache import UntraceableError, program_of
from persample.engines.compiled.program import DoubtfulError, Program
from persample.engines.compiled.reads import Reads
from persample.engines.compiled.recall import remember
from persample.engines.compiled.task import Task, filled_up
from persample.engines.vmap import eager
from persample.errors import LossError
from persample.inputs.call import Call
from persample.inputs.loss import SampleLoss
from persample.merge import Stacked
from persample.outputs import is_apart
from persample.reductions.requested import Reductions
from persample.utils.numeric import full_precision
from persample.utils.trees import tree_map


def compiled(lift: Reductions, loss: SampleLoss, samples: Call, randomness: str) -> Any:
    """Compute the gradients of all samples by compiled code and lift them.

    Args:
        lift: what to do with the gradients.
        loss: the loss of one sample.
        samples: the chunk, not empty.
        randomness: as in ``torch.func.vmap``.

    Returns:
        What ``lift`` returns.

    Raises:
        LossError: if the loss is one that the eager engine refuses, or that cannot be traced.
        RuntimeError: if something of torch's or ours failed.
    """
    return _computed(Task(lift, loss, samples, randomness, finishes=False))[0]


def finished(task: Task, call: tuple[Any, ...]) -> list[Any] | None:
    """Compute the results of all reductions by compiled code, and remember the call.

    Args:
        task: all samples of the call, at least one.
        call: what ``recall`` knows the next call like this one by.

    Returns:
        One result per reduction, or None if they were written into ``task.out``.

    Raises:
        LossError: as ``compiled`` does.
    """
    results, program, reads = _computed(task)
    if program is not None and reads is not None:
        remember(task, program, reads, call)
    return results


def _computed(task: Task) -> tuple[Any, Program | None, Reads | None]:
    """Run the program of a task.

    Args:
        task: what to compute.

    Returns:
        The result, and, where its own code was run, the program and what its loss reads.

    Raises:
        LossError: as ``compiled`` does.
    """
    if peek_interpreter_stack() is not None:  # under a vmap or grad of the caller's there is nothing to trace
        return _eagerly(task), None, None
    try:
        program, reads = program_of(task)
    except UntraceableError as error:
        return _without(task, error), None, None
    if program is None:
        return _filled_up(task), None, None
    captured = program.inputs(reads)
    if task.out is not None and not is_apart(task.out, [*task.read, *captured]):
        return _computed(replace(task, out=None))
    with full_precision(task.samples.params[0].device):
        try:
            return program([*task.tensors, *captured]), program, reads
        except DoubtfulError:
            return _eagerly(task), None, None


def _eagerly(task: Task, *, shortly: bool = True) -> Any:
    return _finish(task, *eager(task.lift, task.loss, task.samples, task.randomness, shortly=shortly))


def _finish(task: Task, lifted: Any, connected: Any) -> Any:
    if not task.finishes:
        return lifted, connected
    return task.lift.finish(lifted, task.samples.params[0].device)


def _without(task: Task, error: UntraceableError) -> Any:
    """Return the result if only the last step, which is done by itself then, cannot be traced; else refuse."""
    failure = error.failure
    if task.finishes and not failure.by_loss:
        return _finish(task, *compiled(task.lift, task.loss, task.samples, task.randomness))
    _eagerly(task, shortly=False)  # what is wrong with the loss itself is said here
    if not failure.by_loss:
        raise RuntimeError(
            f"engine='compiled' failed inside of torch or persample ({failure.reason}). loss_fn is not to blame: pass "
            "engine='eager', which computes the same, and report this, please."
        ) from error
    raise LossError(
        f"loss_fn cannot be compiled ({error}). A program must not depend on values of params or batch, or on "
        "any computed from what it closed over (.item(), .unique(), a bool mask as an index), nor change these. Use "
        "torch.where, or engine='eager' or 'loop'."
    ) from error


def _filled_up(task: Task) -> Any:
    """Return the result, computed with more samples: the last one is repeated with weight 0, and left out again."""
    size = task.samples.size
    lifted, connected = _computed(replace(task, samples=filled_up(task.samples), finishes=False, out=None))[0]

    def first(leaf: Any) -> Any:
        if not isinstance(leaf, Stacked):
            return leaf
        rows = leaf.rows
        return replace(leaf, rows=rows[:size] if isinstance(rows, Tensor) else rows.rows(slice(0, size)))

    return _finish(task, tree_map(first, lifted), connected)
