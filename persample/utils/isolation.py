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
from collections.abc import Callable
from contextlib import _GeneratorContextManager, nullcontext, suppress
from functools import partial
from types import FrameType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from persample import _torch
from persample._torch import DONE_ONCE, compile_lock
from persample.errors import TorchVersionWarning
from persample.utils import trees
from persample.utils.numerics import keep_freed_memory
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
    """Call a function, then undo its changes; if a signal interrupts ``undo``, it is called again.

    A second call of ``undo`` must be harmless where the first one has finished parts of the work.
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
    """Return whether an import, or a function of ``DONE_ONCE``, runs in a frame inside of another one."""
    while frame is not None and frame is not outer:
        if frame.f_code.co_filename == _IMPORTS or frame.f_code.co_name in DONE_ONCE:
            return True
        frame = frame.f_back
    return False


def raise_interrupt(error: Exception, handled: BaseException | None) -> None:
    """Raise an interrupt again if torch raised another error while cleaning up after that interrupt."""
    for cause in raised_since(handled, error):
        if not isinstance(cause, Exception):
            raise cause from None


def in_one_thread(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that waits while another thread compiles, or is in a function made by this one."""

    @functools.wraps(function)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
        lock = compile_lock() if "torch._dynamo.convert_frame" in sys.modules else after_imports(compile_lock)
        with lock:
            return function(*args, **kwargs)

    return waiting


def isolated(params: object, body: Callable[[], T], *, keep_graph: bool = False) -> T:
    """Call the body of a public function without a graph, and restore the modules and torch's state of this thread.

    No other thread can swap parameters into the same modules or their parts: it waits. Everything is restored even if a
    signal interrupts the call.
    """
    if _torch.replaced:
        warnings.warn(TorchVersionWarning(*_torch.replaced), stacklevel=users_depth())
    keep_freed_memory()
    handled = sys.exc_info()[1]
    ours, before, locks = dict(vars(flags)), [read() for read, _ in (*_OWN, *_SHARED)], _locks_of(params)
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
        changed = _OWN
        if (error := sys.exc_info()[1]) is not handled:
            links = raised_since(handled, error)
            frames = [frame for link in links for frame, _ in reversed([*traceback.walk_tb(link.__traceback__)])]
            for frame in frames:
                if frame.f_code in _CONTEXTS:  # its exit was interrupted; as garbage it would be closed too late
                    with suppress(Exception):  # the context may be restored already
                        frame.f_locals["self"].gen.close()
            if any(frame.f_code.co_name in _STEPS for frame in frames):  # else another thread may have changed it
                changed = [*_OWN, *_SHARED]
        for (read, write), value in zip(changed, before, strict=False):
            if read() != value:
                write(value)
        if vars(flags) != ours:
            vars(flags).clear()
            vars(flags).update(ours)
        deque(releases, 0)

    try:
        return undone(
            unrecorded if _torch.load_decompositions.cache_info().currsize else lambda: after_imports(unrecorded), undo
        )
    except Exception as error:
        raise_interrupt(error, handled)
        raise


def _locks_of(params: object) -> list[threading.RLock]:
    """Return a lock for each module among the leaves of a tree and for each of their parts, in one order for all."""
    parts: dict[int, nn.Module] = {}
    rest = trees.flatten(params)[0]
    while rest:
        part = rest.pop()
        if isinstance(part, nn.Module) and id(part) not in parts:
            parts[id(part)] = part
            rest += _torch.module_slots(part).values()
    return [  # C, so in one piece
        (_locks if type(parts[key]).__eq__ is object.__eq__ else _locks_by_id).setdefault(parts[key], _Lock())
        for key in sorted(parts)
    ]


def _leave_forward_mode(before: tuple[int, int]) -> None:
    level, nesting = before
    _torch.set_jvp_nesting(nesting)
    while _torch.forward_levels()[0] > level:
        forward_ad.exit_dual_level()


def _set_stack(stack: Callable[[], Any], push: Callable[[Any], None], pop: Callable[[], Any], modes: Any) -> None:
    while len(stack()) > len(modes):
        pop()
    for mode in modes[len(stack()) :]:  # torch takes a mode off while it is called
        push(mode)


def _leave_saved_tensor_hooks(before: object) -> None:
    while _torch.top_saved_tensors_hooks() not in {None, before}:
        saved_tensors_hooks(torch.clone, torch.clone).__exit__()  # takes the innermost pair off


# The context of all modes; that of a class may do more.
_FUNCTION_MODES = (
    _torch.get_function_mode_stack,
    TorchFunctionMode.__enter__,
    lambda: TorchFunctionMode().__exit__(None, None, None),
)
_DISPATCH_MODES = _torch.dispatch_mode_state, _torch.push_dispatch_mode, _torch.pop_dispatch_mode
_States = list[tuple[Callable[[], Any], Callable[[Any], None]]]  # how to read each and to write it back
# What torch keeps for this thread, and what it keeps once for all threads, that contexts of a call or a loss change.
_OWN: _States = [
    (_torch.get_dynamic_layer_stack_depth, _torch.pop_dynamic_layer_stack_and_undo_to_depth),
    *((modes[0], partial(_set_stack, *modes)) for modes in (_FUNCTION_MODES, _DISPATCH_MODES)),
    (torch.is_grad_enabled, _torch.set_grad_enabled),
    # Not read, but always written: only inference mode forbids forward derivatives, and functions of a single level
    # are allowed only while torch or a rule calls one.
    (object, lambda _: _torch.set_fwd_grad_enabled(not torch.is_inference_mode_enabled())),
    (object, lambda _: _torch.allow_single_level_autograd_function(False)),
    (_torch.top_saved_tensors_hooks, _leave_saved_tensor_hooks),
    *(
        (partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind))
        for kind in ("cpu", "cuda")
    ),
    (_torch.frame_callback_state, _torch.set_eval_frame),
]
_SHARED: _States = [(_torch.dispatch_flags, _torch.set_dispatch_flags), (_torch.forward_levels, _leave_forward_mode)]
