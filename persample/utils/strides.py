"""The layout of a tensor's elements in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from persample._torch import get_unwrapped, is_functorch_wrapped_tensor, keep_strides, storage_id
from persample.utils.tracing import is_for_compiler


def laid_out(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a dense tensor: the tensor itself, or a copy if its memory has gaps.

    Args:
        x: the tensor.
        like: a tensor of as many axes, whose order of axes in memory the result takes. In compiled code the result is
            always contiguous.
    """
    if is_for_compiler(x):
        return keep_strides(x.contiguous())  # otherwise Inductor would remove the copy
    if like is None:
        return x.contiguous()
    order = sorted(range(x.ndim), key=like.stride, reverse=True)
    return x.permute(order).contiguous().permute([order.index(axis) for axis in range(x.ndim)])


def storage_key(x: Tensor) -> int:
    """Return what identifies the memory of a tensor, of one inside of the wrappers of ``torch.func``, too."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return storage_id(x.untyped_storage()) if x.layout is torch.strided else id(x)


def is_folded(x: Tensor) -> bool:
    """Return whether the strides of a tensor allow that several elements share a place in memory."""
    if x.is_contiguous() or not x.numel():
        return False
    reach = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += stride * (size - 1)
    return False
