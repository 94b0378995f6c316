"""The settings of torch that a compiled program depends on."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from persample._torch import global_module_hooks, len_torch_function_stack

_HOOKS = global_module_hooks()


def settings(kind: str) -> tuple[Hashable, ...]:
    """Return the settings that a compiled program depends on: dtypes, devices, autocast, threads, precision, hooks.

    Args:
        kind: the type of the parameters' device, such as "cpu".
    """
    autocast = torch.is_autocast_enabled(kind) if torch.amp.is_autocast_available(kind) else False
    return (
        torch.get_default_dtype(),
        torch.get_default_device() if len_torch_function_stack() else None,  # slow to ask
        autocast and (torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        tuple(map(tuple, _HOOKS)) if any(_HOOKS) else (),
    )
