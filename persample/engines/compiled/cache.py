"""The programs compiled so far, found by everything that they were made for."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from persample.engines.compiled.program import Program, dynamic, static
from persample.engines.compiled.reads import Reads, reads
from persample.engines.compiled.sizes import Varying
from persample.engines.compiled.state import settings
from persample.engines.compiled.task import Task
from persample.engines.compiled.trace import Format

_MOST_FAMILIES = 64
_MOST_PROGRAMS = 16
_OFTEN = 8
_lock = threading.RLock()


@dataclass
class Family:
    """Programs of one loss that differ in sizes, or in values that were read.

    Args:
        programs: the programs, the latest last.
        seen: the formats that they were made for.
        one_size_only: no one program serves all sizes.
    """

    programs: list[Program] = field(default_factory=list)
    seen: list[list[Format]] = field(default_factory=list)
    one_size_only: bool = False


_families: OrderedDict[Hashable, Family] = OrderedDict()
_histories: OrderedDict[Hashable, list[Reads]] = OrderedDict()  # by the loss's code: what each compilation was made for
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


def program_of(task: Task) -> tuple[Program, Reads]:
    """Return the program of a task, compiled if there is none yet, and what its loss reads now.

    Args:
        task: what to compute.
    """
    with _lock:
        now = reads(task.constants)
        formats = [Format.of(x) for x in task.tensors]
        kinds = tuple((len(f.shape), f.dtype, f.device) for f in formats)
        key = (now.key, task.structure, kinds, settings(formats[0].device))
        family = _families.setdefault(key, Family())
        _families.move_to_end(key)
        found = next((p for p in reversed(family.programs) if p.fits(formats) and p.holds(now)), None)
        if found is None:
            try:
                found = _compiled(family, task, now, formats)
            finally:
                if not family.programs:
                    del _families[key]
            _notice(task, now)
        while len(_families) > _MOST_FAMILIES:
            _families.popitem(last=False)
        return found, now


def _compiled(family: Family, task: Task, now: Reads, formats: list[Format]) -> Program:
    program = None
    for before in reversed(family.seen):
        varying = Varying.between(before, formats)
        if varying is not None:
            program = dynamic(task, now, varying)
            break
    program = static(task, now) if program is None else program
    family.programs = [*family.programs, program][-_MOST_PROGRAMS:]
    family.seen = [*family.seen, formats][-_MOST_PROGRAMS:]
    return program


def _notice(task: Task, now: Reads) -> None:
    """Warn if one loss is compiled again and again, and say what changes."""
    code = getattr(task.loss.fn, "__code__", type(task.loss.fn))
    history = _histories.setdefault(code, [])
    _histories.move_to_end(code)
    while len(_histories) > _MOST_FAMILIES:
        _histories.popitem(last=False)
    history.append(now)
    if len(history) == _OFTEN:
        cause = _difference(history[-2], now)
        warnings.warn(
            f"engine='compiled' compiled the same loss_fn {_OFTEN} times: {cause}. Every compilation costs seconds. Pass "
            "what changes in batch (unbatched, with None in in_dims) or as a tensor, or use engine='eager'.",
            RuntimeWarning,
            stacklevel=6,
        )


def _difference(before: Reads, now: Reads) -> str:
    for (path, old), (other, new) in zip(before.facts, now.facts, strict=False):
        if path != other:
            return f"it reads {other} now, and {path} before"
        if old != new:
            return f"{path} changed"
    return "the sizes or dtypes of its inputs, the reductions or torch's settings change"


def on_clear(forget: Callable[[], Any]) -> None:
    """Have something forgotten together with the programs.

    Args:
        forget: what to call.
    """
    _clearers.append(forget)
