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
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from persample._torch import (
    FakeTensor,
    FakeTensorMode,
    disable_current_modes,
    dispatch_mode_state,
    fake_tensor_log,
    get_dispatch_mode_stack,
    inductor_log,
    is_functorch_wrapped_tensor,
    maybe_get_bdim,
    maybe_get_level,
    temporarily_clear_interpreter_stack,
)
from persample.utils.trees import Leaf, Tree

_REQUIRES_GRAD, _TYPE_OF_DEVICE = attrgetter("requires_grad"), attrgetter("device.type")


class _Flags(threading.local):
    """The user's function that runs in a thread; see ``inside``."""

    inside: str | None = None
    owner: Any = None
    refusal: Exception | None = None


flags = _Flags()


@dataclass(frozen=True)
class Trace:
    """The state of one trace, an attribute of the trace's fake tensor mode, which torch keeps on its own stack."""

    any_size: bool = False  # whether it serves any number of samples, and so cannot loop over blocks of them
    compiles: bool = True  # whether the graph will be compiled; else it runs operation by operation, as eager code does
    exceptions: list[Tensor] = field(default_factory=list)  # 0-d bool tensors: if one is true, the results are invalid
    block_sizes: list[int] = field(default_factory=list)  # the most elements written out at a time

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
    """Return whether an exceptional case (0-d bool) occurs; a trace assumes that it does not, and records it."""
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
    first, *others = trace.exceptions
    # An index may be on another device than its table.
    return torch.stack([first, *(x.to(first.device) for x in others)]).any() if others else first


unwrapped = torch.func.debug_unwrap  # the plain tensor inside of all wrappers, which holds the values of all samples
unwrapped_once = partial(unwrapped, recurse=False)


# Returns whether a tensor belongs to the caller's vmap or grad, so that its values cannot be read.
is_wrapped: Callable[[Tensor], bool] = is_functorch_wrapped_tensor


def is_recorded(x: Tensor) -> bool:
    """Return whether the caller's vmap, or a derivative of the caller's, acts on a tensor.

    Then it is computed by plain arithmetic: no decision depends on its values, and nothing is written into it.
    """
    return x.requires_grad or is_wrapped(x)


def wrapped(x: Tensor) -> Iterator[Tensor]:
    """Yield a tensor and what each of its wrappers holds, the plain tensor last."""
    while is_wrapped(x):
        yield x
        x = unwrapped_once(x)
    yield x


def is_batched(x: object) -> bool:
    """Return whether a value is a tensor that a vmap batches, so that its values may differ between samples."""
    if not isinstance(x, Tensor):
        return False
    return maybe_get_bdim(x) >= 0 or (is_wrapped(x) and is_batched(unwrapped_once(x)))


def is_traced(x: Tensor) -> bool:
    """Return whether a tensor has no values because it is traced, so that no decision can depend on them."""
    return isinstance(x, FakeTensor)


def is_unreadable(x: Tensor) -> bool:
    """Return whether a tensor has no values that a decision could depend on: those of all samples, or of a trace."""
    return is_batched(x) or is_traced(unwrapped(x))


def is_for_compiler(x: Tensor) -> bool:
    """Return whether a tensor is traced for compiled code, which plans memory and layouts itself."""
    return is_traced(x) and is_compiling()


def is_compiling() -> bool:
    """Return whether what is traced now will be compiled."""
    trace = current_trace()
    return trace is None or trace.compiles


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors are neither recorded nor traced for a compiler: their memory may be written into."""
    if not {-1}.issuperset(map(maybe_get_level, tensors)) or any(map(_REQUIRES_GRAD, tensors)):
        return False
    return FakeTensor not in map(type, tensors) or not is_compiling()


def are_free_to_read(tensors: Sequence[Tensor]) -> bool:
    """Return whether an ``Opaque`` function may decide by the values of tensors, without waiting for a device."""
    return are_plain(tensors) and {"cpu"}.issuperset(map(_TYPE_OF_DEVICE, tensors))


class Opaque:
    """A function that may read values: one node of a program that runs operation by operation."""

    functions: ClassVar[dict[object, Callable[..., Tensor]]] = {}  # by the operations that stand for them

    def __init__(self, schema: str, function: Callable[..., Tensor], like: Callable[..., Tensor]) -> None:
        self._schema, self._function, self._like = schema, function, like

    def __call__(self, *args: Leaf) -> Tensor:
        """Return the result of the function."""
        first = args[0][0] if type(args[0]) is list else args[0]  # if one tensor is traced, all are
        is_node = type(first) is FakeTensor and not is_compiling()
        result: Tensor = (self.operation if is_node else self._function)(*args)
        return result

    @cached_property
    def operation(self) -> Tree:
        """The function as an operation of torch, registered when it is needed."""
        name, types = self._schema.split("(", 1)
        free = torch.Tag.flexible_layout  # Inductor would copy operands that it laid out in its own way
        made = torch.library.custom_op(
            f"persample::{name}", self._function, mutates_args=(), schema=f"({types}", tags=[free]
        )
        made.register_fake(self._like)
        self.functions[getattr(torch.ops.persample, name).default] = self._function
        return made


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
def inside(function: str, owner: object = None) -> Iterator[None]:
    """Mark that a user's function that is differentiated runs: gradients computed inside would be constants there.

    A refusal that was raised inside is raised at the end, even if the function, or torch, caught it. The function must
    leave the tensors of ``owner`` alone, a ``ParamTree``.
    """
    before = flags.inside, flags.owner, None
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
    return flags.inside
