"""The frame around every public function: no graph is recorded, modules are locked, torch's state is restored."""

from __future__ import annotations

import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd import forward_ad

from persample import _torch
from persample.errors import TorchVersionWarning
from persample.utils import trees
from persample.utils.flags import flags
from persample.utils.interrupts import after_imports, broke_off, close_contexts, raise_interrupt, undone
from persample.utils.origin import users_depth

T = TypeVar("T")
_Lock = type(threading.RLock())
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


def isolated(params: Any, body: Callable[[], T], *, keep_graph: bool = False) -> T:
    """Call the body of a public function without a graph, and restore the modules and torch's state of this thread.

    No other thread can swap parameters into the same modules or their parts: it waits. Everything is restored even if a
    signal interrupts the call.

    Args:
        params: a pytree, perhaps with modules among its leaves.
        body: the function.
        keep_graph: whether to record a graph where the caller's grad mode does.

    Returns:
        What ``body`` returns.

    Raises:
        BaseException: what ``body`` raises; or an interrupt in whose wake torch raised another error.
    """
    if _torch.replaced:
        warnings.warn(TorchVersionWarning(*_torch.replaced), stacklevel=users_depth())
    handled = sys.exc_info()[1]
    ours, own, shared, locks = dict(vars(flags)), _read(_STATE), _read(_SHARED), _locks_of(params)
    held: list[threading.RLock] = []
    releases = map(_Lock.release, held)  # an iterator: after an interrupt it goes on, so that each is released once

    def unrecorded() -> T:
        held.extend(filter(_Lock.acquire, locks))  # in C: a signal cannot come between acquiring a lock and listing it
        records = keep_graph and torch.is_grad_enabled()
        # Tensors made in inference mode cannot be differentiated.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            _torch.set_grad_enabled(records)
            return body()

    def undo() -> None:
        if (error := sys.exc_info()[1]) is not handled:
            close_contexts(error, handled)
        _write(_STATE, own)
        if error is not handled and broke_off(error, handled):  # otherwise another thread may have changed it
            _write(_SHARED, shared)
        if vars(flags) != ours:
            vars(flags).clear()
            vars(flags).update(ours)
        deque(releases, 0)

    try:
        return undone(unrecorded if _torch.has_loaded_decompositions() else lambda: after_imports(unrecorded), undo)
    except Exception as error:
        raise_interrupt(error, handled)
        raise


def _locks_of(params: Any) -> list[threading.RLock]:
    """Return a lock for each module among the leaves of a tree and for each of their parts, in one order for all."""
    parts: dict[int, nn.Module] = {}
    rest = trees.flatten(params)[0]
    while rest:
        part = rest.pop()
        if isinstance(part, nn.Module) and id(part) not in parts:
            parts[id(part)] = part
            rest += _torch.module_slots(part).values()
    return [_locks.setdefault(parts[key], threading.RLock()) for key in sorted(parts)]  # C, so in one piece


_States = list[tuple[Callable[[], Any], Callable[[Any], None]]]  # how to read each and to write it back


def _read(states: _States) -> list[Any]:
    return [read() for read, _ in states]


def _write(states: _States, before: Sequence[Any]) -> None:
    for (read, write), value in zip(states, before, strict=True):
        if read() != value:
            write(value)


def _leave_transforms(depth: int) -> None:
    if _torch.get_dynamic_layer_stack_depth() > depth:
        _torch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


def _leave_forward_mode(before: tuple[int, int]) -> None:
    level, nesting = before
    _torch.set_jvp_nesting(nesting)
    while _torch.forward_levels()[0] > level:
        forward_ad.exit_dual_level()


def _restored(push: Callable[[Any], None], pop: Callable[[], Any], stack: Callable[[], Any]) -> Callable[[Any], None]:
    def write(modes: Sequence[Any]) -> None:
        while len(stack()) > len(modes):
            pop()
        for mode in modes[len(stack()) :]:  # torch takes a mode off while it is called
            push(mode)

    return write


def _disable_saved_tensor_hooks(message: str | None) -> None:
    if message is None:
        _torch.saved_tensors_hooks_enable()
    else:
        _torch.saved_tensors_hooks_disable(message)


def _autocast() -> tuple[bool, bool]:
    return torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def _set_autocast(enabled: tuple[bool, bool]) -> None:
    torch.set_autocast_enabled("cpu", enabled[0])
    torch.set_autocast_enabled("cuda", enabled[1])


# What torch keeps for this thread, and what it keeps once for all threads, that contexts of a call or a loss change.
_STATE: _States = [
    (_torch.get_dynamic_layer_stack_depth, _leave_transforms),
    (
        _torch.get_function_mode_stack,
        _restored(_torch.push_function_mode, _torch.pop_function_mode, _torch.get_function_mode_stack),
    ),
    (
        _torch.dispatch_mode_state,
        _restored(_torch.push_dispatch_mode, _torch.pop_dispatch_mode, _torch.dispatch_mode_state),
    ),
    (torch.is_grad_enabled, _torch.set_grad_enabled),
    (_torch.is_fwd_grad_enabled, _torch.set_fwd_grad_enabled),
    (_torch.get_single_level_autograd_function_allowed, _torch.set_single_level_autograd_function_allowed),
    (_torch.saved_tensors_hooks_disabled_message, _disable_saved_tensor_hooks),
    (_autocast, _set_autocast),
    (_torch.frame_callback_state, _torch.set_eval_frame),
]
_SHARED: _States = [
    (_torch.dispatch_flags, _torch.set_dispatch_flags),
    (_torch.forward_levels, _leave_forward_mode),
]
