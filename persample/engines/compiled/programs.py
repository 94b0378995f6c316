"""The programs of a captured loss: for each kind of call one for its batch size, and then one for all batch sizes."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from persample.engines.compiled import capture
from persample.engines.compiled.program import Program, dynamic, static
from persample.engines.compiled.sizes import Varying
from persample.engines.compiled.task import Task, full_size
from persample.engines.compiled.trace import Format, TraceError, said
from persample.utils.origin import handled_error, is_users

_MOST_FAMILIES = 64
_MOST_PROGRAMS = 16
_OFTEN = 8
_lock = threading.RLock()


@dataclass(frozen=True)
class Failure:
    """The reason that a task has no program.

    Args:
        reason: the first line of the error.
        by_loss: True if the loss, or the ``lift`` of a reduction, cannot be traced; False if a reduction's ``finish``,
            torch or this library failed.
    """

    reason: str
    by_loss: bool


class UntraceableError(Exception):
    """Raised for a task that cannot be compiled: at the first attempt, and at every later call.

    Args:
        failure: the reason.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


@dataclass
class Family:
    """The programs of one kind of call, which differ in sizes.

    Args:
        programs: the programs, the latest last.
        seen: the formats of the inputs that each program was compiled for.
        failure: the reason that there is no program, or None.
        is_frozen: whether tracing has shown that no single program serves all batch sizes.
    """

    programs: list[Program] = field(default_factory=list)
    seen: list[list[Format]] = field(default_factory=list)
    failure: Failure | None = None
    is_frozen: bool = False


def clear_cache() -> None:
    """Forget all compiled programs, and torch's record of the losses that they were compiled from.

    Inductor's cache on disk stays, so the same program compiles fast again.

    Examples:
        >>> from persample import clear_cache
        >>> clear_cache()
    """
    capture.forget()


def compilations() -> int:
    """Return the number of programs that are alive."""
    captures = [made for entry in capture.entries() for made in entry.captures]
    return sum(len(family.programs) for made in captures for family in made.programs.values())


def program_of(task: Task) -> Program | None:
    """Return the program of a task, compiled now if there is none.

    Args:
        task: the task, captured.

    Returns:
        The program, or None if the batch must be padded to a power of two first.

    Raises:
        UntraceableError: if the task cannot be compiled.
        Exception: the loss's own errors.
    """
    formats = [Format.of(x) for x in task.tensors]
    with _lock:
        family = _family(task, (task.structure, _kinds(formats)))
        found = next((p for p in reversed(family.programs) if p.fits(task, formats)), None)
        if found is None and not (family.is_frozen and full_size(task.call.size) > task.call.size):
            if family.failure:
                raise UntraceableError(family.failure)
            found = _compiled(family, task, formats)
        return found


def _family(task: Task, key: Hashable) -> Family:
    if task.capture is None:
        return Family()
    programs, history = task.capture.programs, task.capture.history
    history.batch_sizes.add(task.call.size)
    family = programs.setdefault(key, Family())
    programs.move_to_end(key)
    while len(programs) > _MOST_FAMILIES:
        programs.popitem(last=False)
    return family


def _kinds(formats: list[Format]) -> Hashable:
    return tuple((len(f.shape), f.dtype, f.device) for f in formats)


def _compiled(family: Family, task: Task, formats: list[Format]) -> Program | None:
    changes = (Varying.between(before, formats) for before in reversed(family.seen))
    varying = next((change for change in changes if change is not None), None)
    if varying is None and not family.seen and task.capture and len(task.capture.history.batch_sizes) > 1:
        varying = Varying.batch(task.batched)
    if varying is not None and min(varying.of(formats) or (0,)) < 2:
        varying = None  # programs for many sizes exclude sizes 0 and 1, which torch specializes on
    by_batch = varying is not None and varying.is_batch_only(task)
    handled, start = handled_error(), time.perf_counter()
    try:
        program = None if varying is None or (family.is_frozen and by_batch) else dynamic(task, varying)
        if program is None and by_batch:
            family.is_frozen = True
            if full_size(task.call.size) > task.call.size:
                return None
        program = static(task) if program is None else program
    except Exception as error:
        if is_users(error, handled):
            raise
        by_loss = isinstance(error, TraceError)
        family.failure = Failure(str(error) if by_loss else said(error), by_loss)
        raise UntraceableError(family.failure) from error
    program.seconds = time.perf_counter() - start
    _notice(task)
    family.programs = [*family.programs, program][-_MOST_PROGRAMS:]
    family.seen = [*family.seen, formats][-_MOST_PROGRAMS:]
    return program


def _notice(task: Task) -> None:
    """Note why a program was compiled, and warn if this happens again and again."""
    if task.capture is None:
        return
    first = not any(family.programs for family in task.capture.programs.values())
    sizes = "sizes, dtypes or strides of params or batch, or an integer that it reads, changed"
    kind = tuple(map(type, task.reductions.reductions)), task.finishes
    reasons = task.capture.history.compilations.setdefault(kind, [])
    reasons.append((task.capture.reason if first else "") or sizes)
    if len(reasons) == _OFTEN:
        warnings.warn(
            f"engine='compiled' compiles the same loss_fn for the {_OFTEN}th time, because this changed: {reasons[-1]}. "
            "Every compilation costs seconds. Pass what changes in batch (unbatched, with None in in_dims) or as a tensor, "
            "or use engine='eager'.",
            RuntimeWarning,
            stacklevel=2,
        )
