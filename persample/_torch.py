"""Private names of torch, each behind a function of ours that says what it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import overrides
from torch._C import _functorch as functorch
from torch._C._dynamo.guards import set_is_in_mode_without_ignore_compile_internals
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad
from torch.utils import _python_dispatch as dispatch

_autograd = torch._C._autograd


def transforms() -> list[str]:
    """Return the names of the ``torch.func`` transforms at work, outermost first: "vmap", "grad", "jvp", …."""
    if functorch.peek_interpreter_stack() is None:  # as a rule; the list takes longer
        return []
    return [level.key().name.lower() for level in retrieve_all_functorch_interpreters()]


def is_forward_mode() -> bool:
    """Return whether a level of ``torch.autograd.forward_ad`` is entered, by others than ``torch.func.jvp``.

    torch counts levels once for all threads, and those of ``jvp``, which ``transforms`` tells of, may be another's.
    """
    return forward_ad._current_level >= 0 and not eager_transforms.JVP_NESTING


def active_fake_mode() -> Any:
    """Return the mode that makes this thread's tensors fake, or None; torch has no public name for it."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def thread_state() -> list[Any]:
    """Return what transforms, modes and contexts of torch change for this thread until they are left."""
    return [read() for read, _ in _STATES]


def restore_thread_state(before: Sequence[Any]) -> None:
    """Leave every transform, mode and context of torch that was entered since.

    Args:
        before: what ``thread_state`` returned.
    """
    _restore(_STATES, before)


def shared_state() -> list[Any]:
    """Return the same of what torch keeps once for all threads."""
    return [read() for read, _ in _SHARED]


def restore_shared_state(before: Sequence[Any]) -> None:
    """Put back what torch keeps once for all threads, others that change it meanwhile or not.

    Args:
        before: what ``shared_state`` returned.
    """
    _restore(_SHARED, before)


def _restore(states: Sequence[tuple[Callable[[], Any], Callable[[Any], None]]], before: Sequence[Any]) -> None:
    for (read, write), value in zip(states, before, strict=True):
        if read() != value:
            write(value)


def _leave_transforms(depth: int) -> None:
    if functorch.get_dynamic_layer_stack_depth() > depth:
        functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


def _leave_forward_mode(before: tuple[int, int]) -> None:
    level, eager_transforms.JVP_NESTING = before
    while forward_ad._current_level > level:
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
        _autograd._saved_tensors_hooks_enable()
    else:
        _autograd._saved_tensors_hooks_disable(message)


def _dispatch_flags() -> tuple[bool, bool, bool]:
    return (
        dispatch._is_in_torch_dispatch_mode,
        dispatch._is_in_non_infra_torch_dispatch_mode,
        dispatch._is_in_any_mode_without_ignore_compile_internals,
    )


def _set_dispatch_flags(flags: tuple[bool, bool, bool]) -> None:
    dispatch._is_in_torch_dispatch_mode, dispatch._is_in_non_infra_torch_dispatch_mode, compiles = flags
    dispatch._is_in_any_mode_without_ignore_compile_internals = compiles
    set_is_in_mode_without_ignore_compile_internals(compiles)


def _autocast() -> tuple[bool, bool]:
    return torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def _set_autocast(enabled: tuple[bool, bool]) -> None:
    torch.set_autocast_enabled("cpu", enabled[0])
    torch.set_autocast_enabled("cuda", enabled[1])


def _attention_kernels() -> tuple[bool, bool, bool, bool]:
    backends = torch.backends.cuda
    return (
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.math_sdp_enabled(),
        backends.cudnn_sdp_enabled(),
    )


def _set_attention_kernels(enabled: tuple[bool, bool, bool, bool]) -> None:
    backends = torch.backends.cuda
    backends.enable_flash_sdp(enabled[0])
    backends.enable_mem_efficient_sdp(enabled[1])
    backends.enable_math_sdp(enabled[2])
    backends.enable_cudnn_sdp(enabled[3])


_STATES: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
    (functorch.get_dynamic_layer_stack_depth, _leave_transforms),
    (
        overrides._get_current_function_mode_stack,
        _restored(overrides._push_mode, overrides._pop_mode, torch._C._len_torch_function_stack),
    ),
    (
        dispatch._get_current_dispatch_mode_stack,
        _restored(dispatch._push_mode, dispatch._pop_mode, torch._C._len_torch_dispatch_stack),
    ),
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch._C._is_fwd_grad_enabled, torch._C._set_fwd_grad_enabled),
    (functorch.get_single_level_autograd_function_allowed, functorch.set_single_level_autograd_function_allowed),
    (_autograd._saved_tensors_hooks_get_disabled_error_message, _disable_saved_tensor_hooks),
    (_autocast, _set_autocast),
]
_SHARED: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
    (_dispatch_flags, _set_dispatch_flags),
    (lambda: (forward_ad._current_level, eager_transforms.JVP_NESTING), _leave_forward_mode),
    (_attention_kernels, _set_attention_kernels),
]
