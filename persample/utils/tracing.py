"""Traces, tensors without values; and what a thread keeps as long as one call.

The state of a trace, and ``flags``, cannot be arguments, because the user's loss or torch's own code runs between the
code that sets them and the code that reads them. Each context restores the previous value of a flag;
``isolation.isolated`` does so if a signal interrupts it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from persample._torch import (
    FakeTensor,
    FakeTensorMode,
    disable_current_modes,
    dispatch_mode_state,
    fake_tensor_log,
    get_dispatch_mode_stack,
    get_unwrapped,
    inductor_log,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    temporarily_clear_interpreter_stack,
)

_REQUIRES_GRAD, _TYPE_OF_DEVICE = attrgetter("requires_grad"), attrgetter("device.type")
flags = threading.local()


@dataclass(frozen=True)
class Trace:
    """The state of one trace; it is an attribute of the trace's fake tensor mode, which torch keeps on its own stack.

    Args:
        any_size: whether the program will serve any number of samples, so that it cannot loop over blocks of samples.
        exceptions: 0-d bool tensors; if one of them is true, the results of the program are invalid.
        block_sizes: the numbers of gradient elements written out at a time where ``any_size`` forbade a loop.
    """

    any_size: bool = False
    exceptions: list[Tensor] = field(default_factory=list)
    block_sizes: list[int] = field(default_factory=list)

    def fake_tensors(self) -> FakeTensorMode:
        """Return the fake tensor mode to trace under, in which new tensors have shapes but no values."""
        get_dispatch_mode_stack()  # raises an error if ``current_trace`` could not see the mode
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        vars(mode)["persample_trace"] = self
        return mode


def current_trace() -> Trace | None:
    """Return the trace that runs in this thread, if one does."""
    traces = (getattr(mode, "persample_trace", None) for mode in dispatch_mode_state() or ())
    return next((trace for trace in traces if trace is not None), None)


def holds(exceptional: Tensor) -> bool:
    """Return whether an exceptional case occurs; a trace assumes that it does not, and records the condition.

    Args:
        exceptional: the condition, a 0-d bool tensor.
    """
    if not is_traced(exceptional):
        return bool(exceptional)
    trace = current_trace()
    if trace is not None:
        trace.exceptions.append(exceptional)
    return False


def any_exception() -> Tensor | None:
    """Return whether a case that the running trace assumed away occurs, a 0-d bool tensor; None if there is none."""
    trace = current_trace()
    if trace is None or not trace.exceptions:
        return None
    device = trace.exceptions[0].device  # an index may be on another device than its table
    return torch.stack([x.to(device) for x in trace.exceptions]).any()


# Returns whether a tensor belongs to the caller's vmap or grad, so that its values cannot be read.
is_wrapped: Callable[[Tensor], bool] = is_functorch_wrapped_tensor


def is_recorded(x: Tensor) -> bool:
    """Return whether the caller's vmap, or a derivative of the caller's, acts on a tensor.

    Then it is computed by plain arithmetic: no decision depends on its values, and nothing is written into it.
    """
    return x.requires_grad or is_wrapped(x)


def is_hidden(x: object) -> bool:
    """Return whether a value is a tensor of the caller's vmap, which has another value for each of its rows."""
    while isinstance(x, Tensor) and is_wrapped(x):
        if is_batchedtensor(x):
            return True
        x = get_unwrapped(x)
    return False


def is_traced(x: Tensor) -> bool:
    """Return whether a tensor has no values because it is traced, so that no decision can depend on them."""
    return isinstance(x, FakeTensor)


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors are neither recorded nor traced: their memory may be written into."""
    return not (any(map(is_wrapped, tensors)) or any(map(_REQUIRES_GRAD, tensors)) or FakeTensor in map(type, tensors))


def are_free_to_read(tensors: Sequence[Tensor]) -> bool:
    """Return whether decisions may depend on the values of plain tensors, without waiting for a device."""
    return are_plain(tensors) and {"cpu"}.issuperset(map(_TYPE_OF_DEVICE, tensors))


@contextmanager
def without_warnings() -> Iterator[None]:
    """Ignore warnings and logs: those of torch's compiler address its developers."""

    def ignore(_record: object) -> bool:
        return False

    logs = fake_tensor_log, inductor_log
    for log in logs:
        log.addFilter(ignore)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log in logs:
            log.removeFilter(ignore)


@contextmanager
def untraced() -> Iterator[None]:
    """Compute with real tensors inside of a trace, and with tensors of their own inside of the caller's transforms."""
    with disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


@contextmanager
def inside(function: str, owner: Any = None) -> Iterator[None]:
    """Mark that a user's function that is differentiated runs: gradients computed inside would be constants there.

    Args:
        function: the name of the function, for error messages.
        owner: the ``ParamTree`` whose tensors the function must leave alone; None if there is none.

    Raises:
        Exception: a refusal that was raised inside, even if the function, or torch, caught it.
    """
    before = getattr(flags, "inside", None), getattr(flags, "owner", None), None
    flags.inside, flags.owner, flags.refusal = function, owner, None
    try:
        yield
    finally:
        refusal = flags.refusal
        flags.inside, flags.owner, flags.refusal = before
        if refusal is not None:
            raise refusal


def is_inside() -> str | None:
    """Return the name of the user's function that runs in this thread, or None."""
    return getattr(flags, "inside", None)


def owner_inside() -> Any:
    """Return the owner of the tensors that the function of ``is_inside`` must leave alone, or None."""
    return getattr(flags, "owner", None)
