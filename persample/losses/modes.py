"""Makes each loss a single call for ``__torch_function__`` modes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch.overrides import handle_torch_function, has_torch_function

_Loss = TypeVar("_Loss", bound=Callable[..., Any])


def overridable(loss: _Loss) -> _Loss:
    """Let ``__torch_function__`` modes intercept a function as a whole, like those of ``torch.nn.functional``.

    The eager engine runs such a mode, which would otherwise intercept each access to a shape, at 2 µs each.

    Args:
        loss: a function of tensors.

    Returns:
        The overridable function.

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
