"""Operations that torch.func cannot batch, or batches in a loop, replaced by compositions of those it batches well."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from persample.vmap_rules.copies import COPIES
from persample.vmap_rules.distances import DISTANCES
from persample.vmap_rules.filling import FILLING
from persample.vmap_rules.functional import FUNCTIONAL
from persample.vmap_rules.lookups import LOOKUPS
from persample.vmap_rules.nested import NESTED
from persample.vmap_rules.packing import PACKING
from persample.vmap_rules.reads import READS
from persample.vmap_rules.recurrent import RECURRENT
from persample.vmap_rules.rows import SecondDerivativeError, composed, plain_autograd
from persample.vmap_rules.strides import STRIDES, any_format

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


__all__ = ["SecondDerivativeError", "composed", "plain_autograd", "rewritten"]
