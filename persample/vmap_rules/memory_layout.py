"""Strides, formats and sizes of memory, which under vmap are not as they are for one sample."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from persample.errors import LossError
from persample.vmap_rules.rows import is_batched

_RANKS = {torch.channels_last: 4, torch.channels_last_3d: 5}


def any_format(x: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keyword arguments of a call without a memory format that vmap would look for among all samples' axes.

    Args:
        x: what is called with.
        options: the keyword arguments.

    Returns:
        The same, or without ``memory_format``: the values do not depend on it.
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
        raise _refused(function)
    return function(input, size, stride, storage_offset)


def _as_strided_scatter(
    function: Callable[..., Tensor],
    input: Tensor,  # noqa: A002
    src: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    if is_batched(input) or is_batched(src):
        raise _refused(function)
    return function(input, src, *args, **kwargs)


def _as_strided_in_place(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
    if is_batched(input):
        raise _refused(Tensor.as_strided_)
    return input.as_strided_(*args, **kwargs)


def _resized(function: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
    if is_batched(input) and not input.is_contiguous():
        raise _refused(function)
    return function(input, *args, **kwargs)


def _view_as_complex(input: Tensor) -> Tensor:  # noqa: A002
    # Pairs that lie side by side in one sample may be apart where the samples lie in between.
    return torch.view_as_complex(input if input.stride()[-1:] == (1,) or not is_batched(input) else input.contiguous())


def _addbmm_in_place(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
    out = torch.addbmm(input, *args, **kwargs)
    if input.shape != out.shape:  # torch resizes the tensor, torch.func does not
        raise LossError(
            f"loss_fn: addbmm_ expected a tensor of the shape of its result, {list(out.shape)}, received "
            f"{list(input.shape)}. Use torch.addbmm, which makes a new one."
        )
    return input.copy_(out)


def _refused(function: Any) -> LossError:
    return LossError(
        f"loss_fn: {function.__name__} reads memory by its place, and a sample has none of its own: under vmap it lies "
        "among the others. Use an index, unfold, narrow or reshape (as_strided on a contiguous tensor, without "
        "storage_offset, is taken), or pass engine='loop'."
    )


STRIDES: dict[Any, Callable[..., Any]] = {
    **{
        function: functools.partial(_as_strided, function)
        for function in (torch.as_strided, Tensor.as_strided, torch.as_strided_copy)
    },
    **{
        function: functools.partial(_as_strided_scatter, function)
        for function in (torch.as_strided_scatter, Tensor.as_strided_scatter)
    },
    Tensor.addbmm_: _addbmm_in_place,
    **{function: functools.partial(_resized, function) for function in (Tensor.resize_, Tensor.resize_as_)},
    torch.view_as_complex: _view_as_complex,
    torch.as_strided_: _as_strided_in_place,
    Tensor.as_strided_: _as_strided_in_place,
}
