"""The compiled engine: the eager one, traced once to a flat graph, and that as compiled code."""

from __future__ import annotations

from typing import Any

from torch._C._functorch import peek_interpreter_stack

from persample.engines.compiled.cache import program_of
from persample.engines.compiled.program import DoubtfulError, Program
from persample.engines.compiled.reads import Reads
from persample.engines.compiled.recall import remember
from persample.engines.compiled.task import Task
from persample.engines.eager import eager
from persample.errors import LossError
from persample.lift import Lift
from persample.loss import SampleLoss
from persample.numeric import full_precision
from persample.samples import Samples


def compiled(lift: Lift, loss: SampleLoss, samples: Samples, randomness: str) -> Any:
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
    """
    return _computed(Task(lift, loss, samples, randomness, finishes=False))[0]


def finished(lift: Lift, loss: SampleLoss, samples: Samples, randomness: str, call: tuple[Any, ...]) -> list[Any]:
    """Compute the results of all reductions by compiled code, and remember the call.

    Args:
        lift: what to do with the gradients.
        loss: the loss of one sample.
        samples: all samples, at least one.
        randomness: as in ``torch.func.vmap``.
        call: what ``recall`` knows the next call like this one by.

    Returns:
        One result per reduction.

    Raises:
        LossError: as ``compiled`` does.
    """
    task = Task(lift, loss, samples, randomness, finishes=True)
    results, program, reads = _computed(task)
    if program is not None and reads is not None:
        remember(task, program, reads, call)
    return results


def _computed(task: Task) -> tuple[Any, Program | None, Reads | None]:
    """Run the program of a task.

    Args:
        task: what to compute.

    Returns:
        The result, and, where code was run, the program and what its loss reads.

    Raises:
        LossError: as ``compiled`` does.
    """
    if peek_interpreter_stack() is not None:  # under a vmap or grad of the caller's there is nothing to trace
        return _eagerly(task), None, None
    try:
        program, reads = program_of(task)
    except Exception as error:
        _eagerly(task)  # what is wrong with the loss itself is said there
        raise LossError(
            f"loss_fn cannot be compiled: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}. "
            "Its program must not depend on values of params or batch (.item(), .unique(), a mask as an index). Use "
            "torch.where, or engine='eager' or 'loop'."
        ) from error
    with full_precision(task.samples.params[0].device):
        try:
            return program([*task.tensors, *program.inputs(reads)]), program, reads
        except DoubtfulError:
            return _eagerly(task), None, None


def _eagerly(task: Task) -> Any:
    lifted, connected = eager(task.lift, task.loss, task.samples, task.randomness)
    if not task.finishes:
        return lifted, connected
    with full_precision(task.samples.params[0].device):
        return task.lift.finish(lifted)
