"""The frame around every public function: no graph is recorded, modules are locked, torch's state is restored."""

from __future__ import annotations

import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import _GeneratorContextManager, nullcontext, suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd import forward_ad

from persample import _torch
from persample.errors import TorchVersionWarning
from persample.utils import trees
from persample.utils.flags import flags
from persample.utils.interrupts import after_imports, interrupts_first, locked, undone
from persample.utils.origin import handled_error, raised_since, users_depth

T = TypeVar("T")
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_guard = threading.RLock()  # of the locks
_STEPS = {"__enter__", "__exit__"}
_CONTEXTS = {_GeneratorContextManager.__enter__.__code__, _GeneratorContextManager.__exit__.__code__}


def isolated(params: Any, body: Callable[[], T], *, keep_graph: bool = False) -> T:
    """Call the body of a public function without a graph, and restore the modules and torch's state of this thread.

    The modules are locked: other threads wait for them. Everything is restored even if a signal interrupts the call.

    Args:
        params: a pytree, perhaps with modules among its leaves.
        body: the function.
        keep_graph: whether to record a graph where the caller's grad mode does.

    Returns:
        What ``body`` returns.
    """
    if _torch.replaced:
        warnings.warn(TorchVersionWarning(*_torch.replaced), stacklevel=users_depth())

    def unrecorded() -> T:
        # Tensors made in inference mode cannot be differentiated.
        inference = torch.is_inference_mode_enabled()
        grad_mode = torch.set_grad_enabled(keep_graph and torch.is_grad_enabled())
        with torch.inference_mode(False) if inference else nullcontext(), grad_mode:
            return body()

    return in_same_state(lambda: _with_modules(params, unrecorded))


def _with_modules(params: Any, body: Callable[[], T]) -> T:
    """Call a function while no other thread can swap parameters into the same modules or their submodules.

    Args:
        params: a pytree, perhaps with modules among its leaves.
        body: the function.

    Returns:
        What ``body`` returns.
    """
    modules = [leaf for leaf in trees.flatten(params)[0] if isinstance(leaf, nn.Module)]
    parts = {id(part): part for module in modules for part in module.modules()}
    if not parts:
        return body()
    ordered = [parts[key] for key in sorted(parts)]  # one order: no deadlock
    locks: list[Any] = list(map(_locks.get, ordered))
    if None in locks:
        locks = locked([_guard], lambda: [_locks.setdefault(part, threading.RLock()) for part in ordered])
    return locked(locks, body)


def in_same_state(body: Callable[[], T]) -> T:
    """Call a function and restore torch's state of this thread, wherever a signal interrupts the call.

    Args:
        body: the function.

    Returns:
        What ``body`` returns.

    Examples:
        >>> import torch
        >>> in_same_state(lambda: torch.set_grad_enabled(False)).prev, torch.is_grad_enabled()
        (True, True)
    """
    handled = handled_error()
    state, shared, ours = thread_state(), shared_state(), dict(vars(flags))

    def undo() -> None:
        errors = list(raised_since(handled, sys.exc_info()[1]))
        for error in errors:
            _close_contexts(error)
        restore_thread_state(state)
        if any(map(_broke_off, errors)):  # otherwise another thread may have changed the shared state
            restore_shared_state(shared)
        if vars(flags) != ours:
            vars(flags).clear()
            vars(flags).update(ours)

    is_cold = "torch._dynamo" not in sys.modules  # torch.func imports it
    with interrupts_first():
        return undone((lambda: after_imports(body)) if is_cold else body, undo)


def _close_contexts(error: BaseException) -> None:
    """Close ``@contextmanager`` generators whose exit was interrupted; garbage collection would close them too late."""
    for frame in reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)]):
        if frame.f_code in _CONTEXTS:
            with suppress(Exception):  # the context may be restored already
                frame.f_locals["self"].gen.close()


def _broke_off(error: BaseException) -> bool:
    """Return whether an error was raised inside of an ``__enter__`` or ``__exit__``, which may be half done."""
    return any(frame.f_code.co_name in _STEPS for frame, _ in traceback.walk_tb(error.__traceback__))


_States = list[tuple[Callable[[], Any], Callable[[Any], None]]]


def thread_state() -> list[Any]:
    """Return the state that torch keeps for this thread: its transforms, modes and contexts."""
    return [read() for read, _ in _THREAD]


def restore_thread_state(before: Sequence[Any]) -> None:
    """Leave every transform, mode and context of torch that was entered since.

    Args:
        before: what ``thread_state`` returned.
    """
    _restore(_THREAD, before)


def shared_state() -> list[Any]:
    """Return the state that torch keeps once for all threads."""
    return [read() for read, _ in _SHARED]


def restore_shared_state(before: Sequence[Any]) -> None:
    """Write back the state that torch keeps once for all threads, even if another thread changed it since.

    Args:
        before: what ``shared_state`` returned.
    """
    _restore(_SHARED, before)


def _restore(states: _States, before: Sequence[Any]) -> None:
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


def _restored(push: Callable[[Any], None], pop: Callable[[], Any], size: Callable[[], int]) -> Callable[[Any], None]:
    def write(modes: Sequence[Any]) -> None:
        while size() > len(modes):
            pop()
        for mode in modes[size() :]:  # torch takes a mode off while it is called
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


_THREAD: _States = [
    (_torch.get_dynamic_layer_stack_depth, _leave_transforms),
    (
        _torch.get_function_mode_stack,
        _restored(_torch.push_function_mode, _torch.pop_function_mode, _torch.len_torch_function_stack),
    ),
    (
        _torch.dispatch_mode_state,
        _restored(_torch.push_dispatch_mode, _torch.pop_dispatch_mode, _torch.len_torch_dispatch_stack),
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
