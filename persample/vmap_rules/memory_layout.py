"""Strides, memory formats and storage sizes: under vmap they differ from those of one sample."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from persample.errors import LossError
from persample.vmap_rules.batched import is_batched, unwrapped

_RANKS = {torch.channels_last: 4, torch.channels_last_3d: 5}


def without_image_format(x: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keyword arguments of a call, without a memory format that needs 4 or 5 axes if vmap adds another.

    The values of the result do not depend on the format.

    Args:
        x: the first argument of the call.
        options: the keyword arguments, ``memory_format`` among them.
    """
    rank = _RANKS.get(options["memory_format"])
    if rank is None or not isinstance(x, Tensor) or x.ndim != rank or not is_batched(x):
        return options
    return {name: option for name, option in options.items() if name != "memory_format"}


def _as_strided(
    function: Callable[..., Tensor],
    input: Tensor,  # noqa: A002
    size: Any,
    stride: Any,
    storage_offset: int | None = None,
) -> Tensor:
    if is_batched(input) and (storage_offset is not None or not input.is_contiguous()):
        raise _rejected(function)
    return function(input, size, stride, storage_offset)


def _of_plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(x, Tensor) and is_batched(x) for x in (*args, *kwargs.values())):
        raise _rejected(function)
    return function(*args, **kwargs)


def _of_contiguous(function: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
    if is_batched(input) and not input.is_contiguous():
        raise _rejected(function)
    return function(input, *args, **kwargs)


def _view_as_complex(input: Tensor) -> Tensor:  # noqa: A002
    # The batch axis may lie between the two numbers of a pair.
    return torch.view_as_complex(input if input.stride()[-1:] == (1,) or not is_batched(input) else input.contiguous())


def _rejected(function: Any) -> LossError:
    return LossError(
        f"loss_fn: {function.__name__} reads memory by strides or sizes, but under vmap a sample has no memory of its "
        "own: that of the batch holds all samples. Use an index, unfold, narrow or reshape (as_strided on a contiguous "
        "tensor, without storage_offset, is accepted), or pass engine='loop'."
    )


_OF_PLAIN: set[Any] = {
    *(torch.as_strided_scatter, Tensor.as_strided_scatter, torch.as_strided_, Tensor.as_strided_),
    Tensor.storage_offset,
}
_OF_CONTIGUOUS: set[Any] = {Tensor.resize_, Tensor.resize_as_, Tensor.stride, Tensor.dim_order}
RULES: dict[Any, Callable[..., Any]] = {
    **{
        function: functools.partial(_as_strided, function)
        for function in (torch.as_strided, Tensor.as_strided, torch.as_strided_copy)
    },
    **{function: functools.partial(_of_plain, function) for function in _OF_PLAIN},
    **{function: functools.partial(_of_contiguous, function) for function in _OF_CONTIGUOUS},
    torch.view_as_complex: _view_as_complex,
    # A sample has no memory of its own: that of the batch. nn.GRU on a GPU asks whether its weights share memory.
    Tensor.data_ptr: lambda x: unwrapped(x).data_ptr(),
}
