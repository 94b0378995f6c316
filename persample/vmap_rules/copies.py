"""Copies and pickles of parameters inside a loss: of the user's values, not of torch.func's wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, UntypedStorage, nn

from persample._torch import temporarily_clear_interpreter_stack
from persample.utils.tracing import is_traced
from persample.vmap_rules.rows import is_batched, unwrapped


def _deepcopy(x: Tensor, memo: dict[int, Any]) -> Any:
    if not _is_shared_leaf(x):
        return Tensor.__deepcopy__(x, memo)  # type: ignore[no-untyped-call]
    if id(x) not in memo:
        with temporarily_clear_interpreter_stack():
            values = unwrapped(x).detach().clone()
            memo[id(x)] = nn.Parameter(values) if x.requires_grad else values
    return memo[id(x)]


def _untyped_storage(x: Tensor) -> UntypedStorage:
    return unwrapped(x).untyped_storage() if _is_shared_leaf(x) else Tensor.untyped_storage(x)  # pickle reads it


def _is_shared_leaf(x: Tensor) -> bool:
    """Return whether a tensor is one that all samples share, as parameters and buffers are, and has no history."""
    return x.is_leaf and not is_batched(x) and not is_traced(unwrapped(x))


COPIES: dict[Any, Callable[..., Any]] = {Tensor.__deepcopy__: _deepcopy, Tensor.untyped_storage: _untyped_storage}
