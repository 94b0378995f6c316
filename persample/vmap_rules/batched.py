"""The plain tensors inside of the wrappers of ``torch.func``."""

from __future__ import annotations

from torch import Tensor

from persample._torch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor, maybe_get_bdim


def is_batched(x: Tensor) -> bool:
    """Return whether a vmap batches a tensor, so that its values may differ between samples.

    Args:
        x: a tensor.
    """
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            return True
        x = get_unwrapped(x)
    return False


def unwrapped(x: Tensor) -> Tensor:
    """Return the plain tensor inside of all wrappers, which holds the values of all samples.

    Args:
        x: a tensor.
    """
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def is_differentiated(x: Tensor) -> bool:
    """Return whether autograd, or a derivative of torch.func at any level, differentiates a tensor.

    Args:
        x: a tensor.
    """
    while is_functorch_wrapped_tensor(x):
        if x.requires_grad:
            return True
        x = get_unwrapped(x)
    return x.requires_grad


def batch_first(x: Tensor) -> Tensor:
    """Return the tensor inside of the wrapper of a vmap, with the batch axis first.

    Args:
        x: a tensor that a vmap batches.
    """
    inside, axis = get_unwrapped(x), maybe_get_bdim(x)
    return inside.movedim(axis, 0) if axis else inside
