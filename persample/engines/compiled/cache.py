"""The programs compiled so far, found by everything that they were made for."""

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
    """Why there is no program.

    Args:
        reason: what was said.
        by_loss: whether the loss, or how its gradients are lifted, cannot be traced; or else something of torch or ours
            failed, or the last step of a reduction.
    """

    reason: str
    by_loss: bool


class UntraceableError(Exception):
    """Raised for what cannot be compiled, the first time and every time after.

    Args:
        failure: why.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


@dataclass
class Family:
    """Programs of one loss that differ in sizes, or in values that were read.

    Args:
        programs: the programs, the latest last.
        seen: the formats that they were made for.
        failure: why there is no program.
        is_frozen: no one program serves all numbers of samples.
    """

    programs: list[Program] = field(default_factory=list)
    seen: list[list[Format]] = field(default_factory=list)
    failure: Failure | None = None
    is_frozen: bool = False


_families: OrderedDict[Hashable, Family] = OrderedDict()
_histories: OrderedDict[Hashable, list[Facts]] = OrderedDict()  # what each compilation of a loss was made for
_clearers: list[Callable[[], None]] = []


def clear_cache() -> None:
    """Forget all compiled programs, and the losses and modules that they hold on to.

    Programs are few (the 64 latest losses, 16 programs each) and hold no batch, but what a loss closes over lives as
    long as its program. Inductor's cache on disk stays: the same program is compiled again in little time.

    Examples:
        >>> from persample import clear_cache
        >>> clear_cache()
    """
    with _lock:
        for forget in (_families.clear, _histories.clear, *_clearers):
            forget()


def compilations() -> int:
    """Return how many programs there are."""
    return sum(len(family.programs) for family in _families.values())


def program_of(task: Task) -> tuple[Program | None, Reads]:
    """Return the program of a task, compiled if there is none yet, and what its loss reads now.

    Args:
        task: what to compute.

    Returns:
        The program, or None where so many samples should be filled up to a power of two; and what is read.

    Raises:
        UntraceableError: if there can be no program.
        Exception: what the loss itself raises.
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
    """Return an entry of a table of bounded size, which is now the latest."""
    entry = table.setdefault(key, make())
    table.move_to_end(key)
    while len(table) > _MOST_FAMILIES:
        table.popitem(last=False)
    return entry


def _compiled(family: Family, task: Task, now: Reads, formats: list[Format]) -> Program | None:
    changes = (Varying.between(before, formats) for before in reversed(family.seen))
    varying = next((change for change in changes if change is not None), None)
    if varying is not None and min(varying.of(formats) or (0,)) < 2:
        varying = None  # no program for many sizes takes 0 or 1, which torch treats apart
    by_batch = varying is not None and varying.is_batch_only(task)
    handled = handled_error()
    try:
        program = None if varying is None or (family.is_frozen and by_batch) else _dynamic(task, now, varying)
        if program is None and by_batch:
            family.is_frozen = True
            if full_size(task.call.size) > task.call.size:
                return None
        program = static(task, now) if program is None else program
    except Warning:  # which somebody made an error
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
    """Return a program for many sizes, or None where there is none: the loss may refuse sizes that were made up."""
    try:
        return dynamic(task, now, varying)
    except Exception:
        if varying.is_batch_only(task):  # of which the loss sees nothing
            raise
        return None


def _notice(task: Task, now: Reads) -> None:
    """Warn if one loss is compiled again and again for the same reductions, and say what changes."""
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
    """Have something forgotten together with the programs.

    Args:
        forget: what to call.
    """
    _clearers.append(forget)
