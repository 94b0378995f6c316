"""The cache of compiled programs; its key is everything that a program depends on."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from persample.engines.compiled.program import Program, dynamic, static
from persample.engines.compiled.reads import Facts, Reads, reads
from persample.engines.compiled.sizes import Varying
from persample.engines.compiled.state import settings
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
    """Raised for a task that cannot be compiled: at the first attempt, and from the cache at every later call.

    Args:
        failure: the reason.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


@dataclass
class Family:
    """The programs of one loss, which differ in sizes or in the values read from closed-over tensors.

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


_families: OrderedDict[Hashable, Family] = OrderedDict()
_histories: OrderedDict[Hashable, list[Facts]] = OrderedDict()  # the facts of each compilation of a loss
_clearers: list[Callable[[], None]] = []


def clear_cache() -> None:
    """Forget all compiled programs, and the losses and modules that they keep alive.

    The cache holds the programs of the 64 latest losses, 16 programs each, and no batches. The objects that a loss
    closes over live as long as its program. Inductor's cache on disk stays, so the same program compiles fast again.

    Examples:
        >>> from persample import clear_cache
        >>> clear_cache()
    """
    with _lock:
        for forget in (_families.clear, _histories.clear, *_clearers):
            forget()


def compilations() -> int:
    """Return the number of programs in the cache."""
    return sum(len(family.programs) for family in _families.values())


def program_of(task: Task) -> tuple[Program | None, Reads]:
    """Return the program of a task, compiled if the cache has none, and the objects that the loss reads now.

    Args:
        task: the task.

    Returns:
        The program, and the objects that the loss reads. The program is None if the batch must be padded to a power of
        two first.

    Raises:
        UntraceableError: if the task cannot be compiled.
        Exception: the loss's own errors.
    """
    with _lock:
        now = reads(task.constants)
        formats = [Format.of(x) for x in task.tensors]
        kinds = tuple((len(f.shape), f.dtype, f.device) for f in formats)
        family = _kept(_families, (now.facts, task.structure, kinds, settings(formats[0].device.type)), Family)
        found = next((p for p in reversed(family.programs) if p.fits(task, formats) and p.holds(now)), None)
        if found is None and not (family.is_frozen and full_size(task.call.size) > task.call.size):
            if family.failure:
                raise UntraceableError(family.failure)
            _notice(task, now)
            found = _compiled(family, task, now, formats)
        return found, now


def _kept(table: OrderedDict[Any, Any], key: Hashable, make: Callable[[], Any]) -> Any:
    """Return the entry of a key in a table of bounded size (least recently used entries leave first)."""
    entry = table.setdefault(key, make())
    table.move_to_end(key)
    while len(table) > _MOST_FAMILIES:
        table.popitem(last=False)
    return entry


def _compiled(family: Family, task: Task, now: Reads, formats: list[Format]) -> Program | None:
    changes = (Varying.between(before, formats) for before in reversed(family.seen))
    varying = next((change for change in changes if change is not None), None)
    if varying is not None and min(varying.of(formats) or (0,)) < 2:
        varying = None  # programs for many sizes exclude sizes 0 and 1, which torch specializes on
    by_batch = varying is not None and varying.is_batch_only(task)
    handled = handled_error()
    try:
        program = None if varying is None or (family.is_frozen and by_batch) else _dynamic(task, now, varying)
        if program is None and by_batch:
            family.is_frozen = True
            if full_size(task.call.size) > task.call.size:
                return None
        program = static(task, now) if program is None else program
    except Warning:  # a warning filter of the user's turns warnings into errors
        raise
    except Exception as error:
        if is_users(error, handled):
            raise
        by_loss = isinstance(error, TraceError)
        family.failure = Failure(str(error) if by_loss else said(error), by_loss)
        raise UntraceableError(family.failure) from error
    family.programs = [*family.programs, program][-_MOST_PROGRAMS:]
    family.seen = [*family.seen, formats][-_MOST_PROGRAMS:]
    return program


def _dynamic(task: Task, now: Reads, varying: Varying) -> Program | None:
    """Return a program for many sizes, or None: the loss may raise at the sizes that tracing makes up."""
    try:
        return dynamic(task, now, varying)
    except Exception:
        if varying.is_batch_only(task):  # the loss does not see the batch size, so the error is not about it
            raise
        return None


def _notice(task: Task, now: Reads) -> None:
    """Warn if one loss is compiled repeatedly for the same reductions; the warning names the fact that changes."""
    code = getattr(task.call.loss.fn, "__code__", type(task.call.loss.fn))
    history = _kept(_histories, (code, tuple(map(type, task.reductions.reductions)), task.finishes), list)
    history.append(now.facts)
    if len(history) == _OFTEN:
        warnings.warn(
            f"engine='compiled' compiles the same loss_fn for the {_OFTEN}th time: {_difference(*history[-2:])}. Every "
            "compilation costs seconds. Pass what changes in batch (unbatched, with None in in_dims) or as a tensor, "
            "or use engine='eager'.",
            RuntimeWarning,
            stacklevel=6,
        )


def _difference(before: Facts, now: Facts) -> str:
    for (path, old), (other, new) in zip(before, now, strict=False):
        if path != other:
            return f"it reads {other} now, and {path} before"
        if old != new:
            return f"{path} changed"
    return "sizes, dtypes or strides of params or batch, or settings of torch, change"


def on_clear(forget: Callable[[], Any]) -> None:
    """Register a function that ``clear_cache`` calls.

    Args:
        forget: the function, without arguments.
    """
    _clearers.append(forget)
