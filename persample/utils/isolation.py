"""The frame around every public function: no graph is recorded, modules are locked, torch's state is restored.

Its clean-up is one that a signal cannot skip: Ctrl-C may raise between any two bytecodes, also inside of a ``finally``.
"""

from __future__ import annotations

import _thread
import functools
import inspect
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import _GeneratorContextManager, nullcontext, suppress
from types import FrameType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.weak import WeakIdKeyDictionary

from persample import _torch
from persample._torch import DONE_ONCE, compile_lock
from persample.errors import TorchVersionWarning
from persample.utils import trees
from persample.utils.origin import raised_since, users_depth
from persample.utils.tracing import flags

P = ParamSpec("P")
T = TypeVar("T")
_IMPORTS = "<frozen importlib._bootstrap>"  # the file of the frames of an import
_Lock = type(threading.RLock())
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_locks_by_id = WeakIdKeyDictionary()  # of modules that compare their content, such as TensorDictParams; slower
_PAUSE = 0.01  # seconds
_STEPS = {"__enter__", "__exit__"}
_CONTEXTS = {_GeneratorContextManager.__enter__.__code__, _GeneratorContextManager.__exit__.__code__}


def undone(body: Callable[[], T], undo: Callable[[], object]) -> T:
    """Call a function, then undo its changes; if a signal interrupts ``undo``, ``undo`` is called again.

    Args:
        body: the function.
        undo: puts everything back. A second call must be harmless where the first one has finished parts of the work.

    Returns:
        What ``body`` returns.

    Examples:
        >>> entered = ["loss"]
        >>> undone(lambda: len(entered), entered.clear), entered
        (1, [])
    """
    done = False
    try:
        try:
            return body()
        finally:
            undo()
            done = True
    finally:
        if not done:
            undo()


def after_imports(body: Callable[[], T]) -> T:
    """Call a function; a signal that comes while it imports a module is handled once the import is done.

    Torch's compiler, imported at its first use, does not survive half an import: it refuses to register twice what it
    registers. The same holds for what ``DONE_ONCE`` names. Other threads are not interrupted by signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return body()
    here, waiting = inspect.currentframe(), set[int]()
    handlers = {int(x): handler for x in signal.valid_signals() if callable(handler := signal.getsignal(x))}

    def handle(number: int, frame: FrameType | None) -> None:
        waiting.discard(number)
        if _is_importing(frame, here):
            waiting.add(number)
            _thread.start_new_thread(again, (number,))  # takes no lock that the import may hold
        else:
            handlers[number](number, frame)

    def again(number: int) -> None:
        time.sleep(_PAUSE)
        if number in waiting:
            signal.raise_signal(number)

    def handled() -> T:
        for number in handlers:
            signal.signal(number, handle)
        return body()

    def put_back() -> None:
        for number, handler in handlers.items():
            if signal.getsignal(number) is handle:  # else the body has set its own
                signal.signal(number, handler)
        while waiting:
            signal.raise_signal(waiting.pop())

    return undone(handled, put_back)


def _is_importing(frame: FrameType | None, outer: FrameType | None) -> bool:
    """Return whether an import, or what torch does once, is among the frames inside of another one."""
    while frame is not None and frame is not outer:
        if frame.f_code.co_filename == _IMPORTS or frame.f_code.co_name in DONE_ONCE:
            return True
        frame = frame.f_back
    return False


def raise_interrupt(error: Exception, handled: BaseException | None) -> None:
    """Raise an interrupt again if torch raised another error while cleaning up after that interrupt.

    Args:
        error: the error.
        handled: the error that was handled before the ``try``, as ``sys.exc_info`` tells.

    Raises:
        BaseException: the interrupt.
    """
    for cause in raised_since(handled, error):
        if not isinstance(cause, Exception):
            raise cause from None


def close_contexts(error: BaseException | None, handled: BaseException | None) -> None:
    """Close ``@contextmanager`` generators whose exit was interrupted; garbage collection would close them too late.

    Args:
        error: the error that ends a call, or None.
        handled: the error that was handled before the call, as ``sys.exc_info`` tells.
    """
    for link in raised_since(handled, error):
        for frame in reversed([frame for frame, _ in traceback.walk_tb(link.__traceback__)]):
            if frame.f_code in _CONTEXTS:
                with suppress(Exception):  # the context may be restored already
                    frame.f_locals["self"].gen.close()


def broke_off(error: BaseException | None, handled: BaseException | None) -> bool:
    """Return whether an error was raised inside of an ``__enter__`` or ``__exit__``, which may be half done.

    Args:
        error: the error that ends a call, or None.
        handled: the error that was handled before the call, as ``sys.exc_info`` tells.
    """
    tracebacks = (traceback.walk_tb(link.__traceback__) for link in raised_since(handled, error))
    return any(frame.f_code.co_name in _STEPS for frames in tracebacks for frame, _ in frames)


def in_one_thread(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that waits while another thread compiles, or is in a function made by this one.

    Args:
        function: the function.
    """

    @functools.wraps(function)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
        lock = compile_lock() if "torch._dynamo.convert_frame" in sys.modules else after_imports(compile_lock)
        with lock:
            return function(*args, **kwargs)

    return waiting


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
    return [  # C, so in one piece
        (_locks if type(parts[key]).__eq__ is object.__eq__ else _locks_by_id).setdefault(parts[key], threading.RLock())
        for key in sorted(parts)
    ]


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
