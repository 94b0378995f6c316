"""The frame around every public function: no graph is recorded, modules are locked, torch's state is restored."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from persample import _torch
from persample.errors import TorchVersionWarning
from persample.utils import trees
from persample.utils.interrupts import in_same_state
from persample.utils.locks import locked
from persample.utils.origin import users_depth

T = TypeVar("T")
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_guard = threading.RLock()  # of the locks


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
