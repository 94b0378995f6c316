"""Tensors without values, and what code that runs in a trace must know of the trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from persample._torch import (
    FakeTensor,
    FakeTensorMode,
    disable_current_modes,
    get_dispatch_mode_stack,
    is_functorch_wrapped_tensor,
)


@dataclass(frozen=True)
class Trace:
    """One trace of a program. Its fake tensor mode, which torch keeps on its own stack, carries it.

    Args:
        any_size: the program will serve any number of samples, so it cannot loop over blocks of samples.
        exceptions: 0-d bool tensors; if one of them is true, the results of the program are invalid.
        block_sizes: how many numbers were written out at a time where ``any_size`` forbade a loop.
    """

    any_size: bool = False
    exceptions: list[Tensor] = field(default_factory=list)
    block_sizes: list[int] = field(default_factory=list)

    def fake_tensors(self) -> FakeTensorMode:
        """Return the mode that the program is traced under: new tensors have shapes and no values."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        vars(mode)["persample_trace"] = self
        return mode


def current_trace() -> Trace | None:
    """Return the trace that runs in this thread, if one does."""
    traces = (getattr(mode, "persample_trace", None) for mode in get_dispatch_mode_stack())
    return next((trace for trace in traces if trace is not None), None)


def holds(exceptional: Tensor) -> bool:
    """Return whether an exceptional case occurs; a trace assumes that it does not, and records it.

    Args:
        exceptional: a 0-d bool tensor.
    """
    if not is_traced(exceptional):
        return bool(exceptional)
    trace = current_trace()
    if trace is not None:
        trace.exceptions.append(exceptional)
    return False


# Whether a tensor belongs to a vmap or grad of the caller's, so that its values cannot be read.
is_wrapped: Callable[[Tensor], bool] = is_functorch_wrapped_tensor


def is_traced(x: Tensor) -> bool:
    """Return whether a tensor stands for all tensors of its shape, so that no decision can depend on its values."""
    return isinstance(x, FakeTensor)


@contextmanager
def untraced() -> Iterator[None]:
    """Compute with real tensors inside of a trace."""
    with disable_current_modes():
        yield
