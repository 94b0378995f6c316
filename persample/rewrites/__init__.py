"""Operations that torch.func cannot batch, or batches in a loop, replaced by compositions of those it batches well."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from persample.rewrites.caught import Caught
from persample.rewrites.copies import COPIES
from persample.rewrites.distances import DISTANCES
from persample.rewrites.filling import FILLING
from persample.rewrites.functional import FUNCTIONAL
from persample.rewrites.lookups import LOOKUPS
from persample.rewrites.nested import NESTED
from persample.rewrites.packing import PACKING
from persample.rewrites.reads import READS
from persample.rewrites.recurrent import RECURRENT
from persample.rewrites.rows import SecondDerivativeError, composed, plain_autograd
from persample.rewrites.strides import STRIDES, any_format

_REWRITES = {
    **COPIES,
    **DISTANCES,
    **FILLING,
    **FUNCTIONAL,
    **LOOKUPS,
    **NESTED,
    **PACKING,
    **READS,
    **RECURRENT,
    **STRIDES,
}


class rewritten(TorchFunctionMode):  # noqa: N801
    """While it is entered, around a loss under ``torch.func``, its operations are replaced where that helps.

    Exact: up to the order of summation, results and gradients are those of torch.

    Args:
        others: replacements that come before those of this package.

    Examples:
        >>> import torch
        >>> from torch.func import functional_call, grad, vmap
        >>> gru = torch.nn.GRU(2, 3)
        >>> def loss(params, x):
        ...     with rewritten():
        ...         return functional_call(gru, params, x)[0].sum()
        >>> grads = vmap(grad(loss), in_dims=(None, 0))(dict(gru.named_parameters()), torch.ones(5, 7, 2))
        >>> grads["weight_hh_l0"].shape
        torch.Size([5, 9, 3])
    """

    def __init__(self, others: Mapping[Any, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self._rewrites = {**_REWRITES, **others} if others else _REWRITES

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the replacement of a function, or the function itself.

        Args:
            func: a function of torch.
            types: the subclasses of tensors among the arguments.
            args: its arguments.
            kwargs: its keyword arguments.

        Returns:
            What the function returns.
        """
        if kwargs and "memory_format" in kwargs and args and func is not Tensor.is_contiguous:
            kwargs = any_format(args[0], kwargs)
        if kwargs and kwargs.get("distance_function") is not None:  # the loss's own, called where no mode is at work
            kwargs = {**kwargs, "distance_function": functools.partial(self._call, kwargs["distance_function"])}
        return self._rewrites.get(func, func)(*args, **(kwargs or {}))

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        with self:
            return function(*args)


__all__ = ["Caught", "SecondDerivativeError", "composed", "plain_autograd", "rewritten"]
