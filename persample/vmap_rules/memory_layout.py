"""Strides, memory formats and storage sizes: under vmap they differ from those of one sample."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from persample._torch import get_unwrapped
from persample.errors import LossError
from persample.utils.tracing import is_wrapped
from persample.vmap_rules.batched import is_batched

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


def _as_strided_scatter(
    function: Callable[..., Tensor],
    input: Tensor,  # noqa: A002
    src: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    if is_batched(input) or is_batched(src):
        raise _rejected(function)
    return function(input, src, *args, **kwargs)


def _as_strided_in_place(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
    if is_batched(input):
        raise _rejected(Tensor.as_strided_)
    return input.as_strided_(*args, **kwargs)


def _resized(function: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
    if is_batched(input) and not input.is_contiguous():
        raise _rejected(function)
    return function(input, *args, **kwargs)


def _view_as_complex(input: Tensor) -> Tensor:  # noqa: A002
    # The batch axis may lie between the two numbers of a pair.
    return torch.view_as_complex(input if input.stride()[-1:] == (1,) or not is_batched(input) else input.contiguous())


def _data_ptr(input: Tensor) -> int:  # noqa: A002
    # A sample has no memory of its own: that of the batch. nn.GRU on a GPU asks whether its weights share memory.
    while is_wrapped(input):
        input = get_unwrapped(input)  # noqa: A001
    return input.data_ptr()


def _rejected(function: Any) -> LossError:
    return LossError(
        f"loss_fn: {function.__name__} reads memory by strides or sizes, but under vmap a sample has no memory of its "
        "own: that of the batch holds all samples. Use an index, unfold, narrow or reshape (as_strided on a contiguous "
        "tensor, without storage_offset, is accepted), or pass engine='loop'."
    )


RULES: dict[Any, Callable[..., Any]] = {
    **{
        function: functools.partial(_as_strided, function)
        for function in (torch.as_strided, Tensor.as_strided, torch.as_strided_copy)
    },
    **{
        function: functools.partial(_as_strided_scatter, function)
        for function in (torch.as_strided_scatter, Tensor.as_strided_scatter)
    },
    **{function: functools.partial(_resized, function) for function in (Tensor.resize_, Tensor.resize_as_)},
    torch.view_as_complex: _view_as_complex,
    Tensor.data_ptr: _data_ptr,
    torch.as_strided_: _as_strided_in_place,
    Tensor.as_strided_: _as_strided_in_place,
}
