"""The state that torch's transforms, modes and contexts change, to be read before a call and written back after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from persample import _torch

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
