"""The compiled engine: the eager one, traced once to a flat graph, and that as compiled code."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from torch import Tensor

from persample import pipeline
from persample._torch import peek_interpreter_stack
from persample.engines.compiled.cache import UntraceableError, program_of
from persample.engines.compiled.program import DoubtfulError, Program
from persample.engines.compiled.reads import Reads
from persample.engines.compiled.recall import remember
from persample.engines.compiled.task import Task, filled_up
from persample.engines.vmap import by_vmap, eager
from persample.errors import LossError
from persample.inputs.call import Call
from persample.merge import Stacked
from persample.outputs import is_apart
from persample.reductions.requested import Reductions
from persample.utils import trees
from persample.utils.dtypes import full_precision
from persample.utils.trees import tree_map


def compiled(  # noqa: PLR0917
    call: Call,
    reductions: Reductions,
    chunk_size: int | None,
    container: trees.TreeSpec,
    out: Any,
    asked: tuple[Any, ...],
) -> list[Any]:
    """Compute the result of every reduction by compiled code, as ``pipeline.run`` does with the eager engine.

    Args:
        call: the call, at least one sample.
        reductions: what is asked of the gradients.
        chunk_size: how many samples are processed at a time, or None for all.
        container: the container that results are returned in.
        out: a previous result apart from the inputs, which results are written into; None for fresh memory.
        asked: the arguments by which ``recall`` recognizes the next call like this one.

    Returns:
        One result per reduction: the tensors of ``out`` where they were written.

    Raises:
        LossError: if the eager engine refuses the loss, or if it cannot be traced.
        RuntimeError: if something of torch or of this library failed.
    """
    if call.size > (chunk_size or call.size):
        return pipeline.run(call, functools.partial(_lifted, reductions=reductions), reductions, chunk_size)
    task = Task(reductions, call, finishes=True, container=container, out=out)
    results, program, reads = _computed(task)
    if program is not None and reads is not None:
        remember(task, program, reads, asked)
    return results if results is not None else trees.leaves_like(out, container) or []


def _lifted(call: Call, reductions: Reductions) -> Any:
    return _computed(Task(reductions, call, finishes=False))[0]


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
    with full_precision(task.call.params[0].device):
        try:
            return program([*task.tensors, *captured]), program, reads
        except DoubtfulError:
            return _eagerly(task), None, None


def _eagerly(task: Task) -> Any:
    return _finish(task, pipeline.lift_chunks([task.call], eager, task.reductions))


def _finish(task: Task, lifted: Any) -> Any:
    return pipeline.finish(task.call, lifted, task.reductions) if task.finishes else lifted


def _without(task: Task, error: UntraceableError) -> Any:
    """Return the result if only the last step, which is done by itself then, cannot be traced; else refuse."""
    failure = error.failure
    if task.finishes and not failure.by_loss:
        return _finish(task, _lifted(task.call, task.reductions))
    by_vmap(task.call, task.reductions.required_ops)  # what is wrong with the loss itself is said here
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
    size = task.call.size
    lifted = _lifted(filled_up(task.call), task.reductions)

    def first(leaf: Any) -> Any:
        if not isinstance(leaf, Stacked):
            return leaf
        rows = leaf.rows
        return replace(leaf, rows=rows[:size] if isinstance(rows, Tensor) else rows.rows(slice(0, size)))

    return _finish(task, tree_map(first, lifted))
