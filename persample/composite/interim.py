"""Stands in for ``persample.pipeline`` and the new engines until they are merged; then this file goes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from persample import engines
from persample import inputs as checks
from persample.engines import diagnosis
from persample.engines.empty import no_rows, of_fake_sample
from persample.engines.vmap import vmapped as _vmapped
from persample.gradients import Gradients
from persample.inputs import call as calls
from persample.merge import merge
from persample.reductions.requested import Reductions

Engine = Callable[["Call", frozenset[str]], Gradients]


@dataclass(frozen=True)
class Call(calls.Call):
    """A call that knows its loss."""

    loss: Any = None
    randomness: str = "different"

    def chunks(self, chunk_size: int | None) -> Any:
        """Return the samples in chunks."""
        return super().chunks(chunk_size)


def check_call(*args: Any, **options: Any) -> Call:
    """Return the normalized call."""
    loss, samples = checks.check_call(*args, **options)
    return Call(**vars(samples), loss=loss)


@dataclass(frozen=True)
class _Unlifted:
    required_ops: frozenset[str]
    keep_factored: bool = False

    def __call__(self, gradients: Gradients) -> Gradients:
        return gradients


def _engine(old: Any) -> Engine:
    return lambda call, required_ops: old(_Unlifted(required_ops), call.loss, call, call.randomness)


eager, loop = _engine(engines.eager), _engine(engines.loop)


def diagnosed(call: Call, *, batched: bool) -> Any:
    """Explain torch's errors."""
    return diagnosis.diagnosed(call, call.loss, batched=batched)


def unwritten(call: Call) -> Any:
    """Check that nothing was written in place."""
    return diagnosis.unwritten(call.loss, call)


def vmapped(one: Any, call: Call) -> Any:
    """Call a function for all samples at once."""
    return _vmapped(one, call, call.randomness)


def lift_chunks(chunks: Iterable[Call], engine: Engine, reductions: Reductions) -> Any:
    """Lift the gradients of every chunk and merge the leaves."""
    return merge_lifted(reductions(engine(chunk, reductions.required_ops)) for chunk in chunks)


def merge_lifted(lifted: Iterable[Any]) -> Any:
    """Merge the leaves of all chunks."""
    return functools.reduce(merge, lifted)


__all__ = ["Call", "Engine", "check_call", "diagnosed", "eager", "lift_chunks", "loop", "merge_lifted", "no_rows"]
__all__ += ["of_fake_sample", "unwritten", "vmapped"]
