"""Losses as torch's own functions are: to a mode that looks for functions of torch, one function each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch.overrides import handle_torch_function, has_torch_function

_Loss = TypeVar("_Loss", bound=Callable[..., Any])


def overridable(loss: _Loss) -> _Loss:
    """Make a function one that ``__torch_function__`` sees as a whole, as it sees those of ``torch.nn.functional``.

    Else the eager engine, which replaces functions of torch by such a mode, would see each look at a shape: 2 µs each.

    Args:
        loss: a function of tensors.

    Returns:
        The function.

    Examples:
        >>> import torch
        >>> class Named(torch.overrides.TorchFunctionMode):
        ...     def __torch_function__(self, func, types, args=(), kwargs=None):
        ...         print(func.__name__)
        ...         return func(*args, **(kwargs or {}))
        >>> @overridable
        ... def loss(v):
        ...     return v.square().sum()
        >>> x = torch.ones(2)
        >>> with Named():
        ...     value = loss(x)
        loss
    """

    @functools.wraps(loss)
    def whole(*args: Any, **kwargs: Any) -> Any:
        if has_torch_function(args):
            return handle_torch_function(whole, args, *args, **kwargs)
        return loss(*args, **kwargs)

    return whole  # type: ignore[return-value]
