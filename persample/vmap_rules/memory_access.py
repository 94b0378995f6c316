"""The memory of tensors: strides, formats and storage, which differ from those of one sample; access past autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from persample._torch import (
    TransformType,
    is_batchedtensor,
    make_dual,
    peek_interpreter_stack,
    temporarily_clear_interpreter_stack,
)
from persample.errors import LossError
from persample.utils.tracing import is_traced
from persample.vmap_rules.effects import SETS_DATA, refusal
from persample.vmap_rules.levels import is_batched, unwrapped

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


_data = Tensor.data.__get__  # type: ignore[attr-defined]


def _detached_data(x: Tensor, *rest: Any) -> Tensor:
    return x.detach() if is_batchedtensor(x) else _data(x, *rest)  # torch.func rejects .data of what vmap wraps last


def _dual(tensor: Tensor, tangent: Tensor, *, level: int) -> Tensor:
    # linearize traces the function to a graph in which parameters are constants: their gradients would be zeros.
    top = peek_interpreter_stack()
    if get_proxy_mode() is not None and (top is None or top.key() != TransformType.Jvp):
        raise LossError(
            "loss_fn calls torch.func.linearize (or traces a forward derivative), which treats the parameters as "
            "constants. Use torch.func.jvp, or pass engine='loop'."
        )
    return make_dual(tensor, tangent, level=level)


def _set_data(*_: Any) -> None:
    # torch would put a wrapper into the object, which outlives the wrapper's level and crashes when it is read.
    raise refusal("a tensor (x.data = y)")


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
    """Return whether all samples share a tensor that no operation made, as parameters and buffers."""
    return x.is_leaf and not is_batched(x) and not is_traced(unwrapped(x))


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
    _data: _detached_data,
    SETS_DATA: _set_data,
    make_dual: _dual,
    Tensor.__deepcopy__: _deepcopy,
    Tensor.untyped_storage: _untyped_storage,
}
