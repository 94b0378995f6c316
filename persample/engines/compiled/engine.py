"""The engines of captured losses: the pipeline is traced once to a flat graph, which runs as it is, or compiled."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import cast

from persample import pipeline
from persample.engines.compiled.capture import LimitError
from persample.engines.compiled.earlier_calls import Asked, remember
from persample.engines.compiled.programs import DoubtfulError, Program, program_of
from persample.engines.compiled.task import Task, UnfinishedError
from persample.engines.compiled.trace import TraceError
from persample.engines.uncompiled import eager
from persample.errors import LossError
from persample.inputs.call import Call
from persample.pipeline import is_apart
from persample.reductions.base import Reductions
from persample.utils import trees
from persample.utils.numerics import full_precision
from persample.utils.trees import Tree


def compiled(
    call: Call, reductions: Reductions, chunk_size: int | None, asked: Asked | None, out: object, *, engine: str
) -> list[object]:
    """Compute the result of every reduction by a program, as ``pipeline.run`` does with the eager engine.

    By ``asked``, the next call like this one is recognized; None if it is not to be. ``out`` shares no memory with the
    inputs; if the program wrote into its tensors, these are the results.
    """
    if asked is None or call.size > (chunk_size or call.size):
        lift = functools.partial(lift_compiled, reductions=reductions, engine=engine)
        return pipeline.run(call, lift, reductions, chunk_size)
    container = cast("trees.TreeSpec", asked.container)
    results = _computed(Task(reductions, call, finishes=True, engine=engine, container=container, out=out), asked)
    return results if results is not None else trees.leaves_like(out, container) or []


def lift_compiled(call: Call, reductions: Reductions, asked: Asked | None = None, *, engine: str) -> object:
    """Compute the mergeable leaves of one chunk by a program, as ``pipeline.lift_by`` does with other engines."""
    units = call.units  # of unequal sizes, or larger than a chunk: each such call would be a program of its own
    if units is not None and (not isinstance(units.sizes, int) or units.sizes > (units.most or units.sizes)):
        return pipeline.lift_by(eager, reductions)(call)
    return _computed(Task(reductions, call, finishes=False, engine=engine), asked)


def _computed(task: Task, asked: Asked | None = None) -> Tree:
    """Return what the program of a task computes; ``asked`` are the user's arguments if the task is the whole call."""
    captured = None
    try:
        captured = task.captured()
        program = program_of(captured)
    except LimitError:
        return _eagerly(task)
    except UnfinishedError:
        return task.last_step(_computed(replace(task, finishes=False, out=None)))
    except TraceError as error:
        if captured is not None and captured.loss.capture is not None and captured.loss.capture.read_values():
            return _computed(task, asked)
        refusal = error
    else:
        return _run(program, captured, task, asked)
    # Outside of the block above, so that the error of a loss that is wrong is its own.
    engines = "engine='eager', which computes the same, or engine='loop', which takes any loss"
    try:
        task.reductions.lift(eager(task.call, task.reductions.required_ops))
    except LossError as error:
        line = re.search(r"\([^()]*:\d+\)", str(refusal))
        if error.__cause__ is None or line is None or line[0] in str(error):
            raise
        engines = "engine='loop', which takes any loss"  # vmap refuses another line
    advice = (
        f"A {task.engine} loss must not branch on values, nor have shapes that depend on them (use torch.where and "
        "masks), nor write into its arguments or what it closed over, nor keep tensors elsewhere (return them in aux)"
    )
    if re.search(r"requires_grad|autograd\.grad", str(refusal)):
        advice = "Use torch.func.grad, jvp or hessian for a derivative inside the loss"
    raise LossError(f"loss_fn cannot be {task.engine}: {refusal}. {advice}. Or pass {engines}.") from refusal


def _run(program: Program, captured: Task, task: Task, asked: Asked | None) -> Tree:
    if task.out is not None and not is_apart(task.out, captured.read):
        return _computed(replace(task, out=None), asked)
    doubt: DoubtfulError | None = None
    with full_precision(task.call.params[0].device):
        try:
            results = program(captured.tensors)
        except DoubtfulError as error:
            doubt = error
    if doubt is not None:
        results = _eagerly(task)  # raises the same, where the loss is at fault
        if doubt.__cause__ is not None:
            raise doubt.__cause__
        return results
    if asked is not None and (task.out is None) == (asked.out is None):
        remember(asked, captured, program)
    return results


def _eagerly(task: Task) -> Tree:
    return task.last_step(pipeline.lift_chunks([task.call], eager, task.reductions))
