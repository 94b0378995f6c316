"""The dispatch mode under which a backward pass defers the last contraction of each weight gradient."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from persample._torch import OpOverload, schema
from persample.engines.deferred.context import DeferralContext
from persample.engines.deferred.factorize import terms_of
from persample.engines.deferred.placeholder import Placeholder, defer, values_of
from persample.engines.deferred.producers import PRODUCERS, index_put
from persample.engines.deferred.rules import apply
from persample.factors.base import Factor
from persample.factors.cost_model import Plan
from persample.vmap_rules.kernel_call import DeferringMode


class Deferral(DeferringMode):
    """Defers products of back-propagated signals and inputs where the cost model prefers that: they are placeholders.

    Under ``torch.func`` a dispatch mode sees the operations that vmap has batched already. Some of the deferred
    products are not the gradient of a parameter; the operations that need them compute them.

    Args:
        plan: how gradients are stored.
        params: the parameters: products with them are signals, not gradients, and are never deferred.
    """

    supports_higher_order_operators = True  # of the compiler: its loops

    def __init__(self, plan: Plan, params: Iterable[Tensor]) -> None:
        super().__init__()
        self._context = DeferralContext(plan, params)

    def deferred(self, factor: Factor) -> Placeholder:
        """Return the gradients of a factor as if this backward pass had deferred them.

        Args:
            factor: the gradients of one parameter.
        """
        shape = (len(factor), *factor.shape)
        return defer(terms_of(factor), shape, factor.dtype, factor.device, self._context.pending)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Defer a product, apply a rule to placeholders, or call the operation.

        Args:
            func: an operation of aten, or a loop.
            types: the tensor subclasses among the arguments.
            args: the arguments of the operation.
            kwargs: the keyword arguments of the operation.

        Returns:
            The result of the operation, a placeholder if it is deferred.
        """
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*values_of(list(args), str(func)), **kwargs)
        if self._context.pending.is_computing:
            return func(*args, **kwargs)
        producer, written_arguments = _lookup(func)
        for place, name in written_arguments:
            written = args[place] if place < len(args) else kwargs.get(name)
            for x in written if isinstance(written, list | tuple) else [written]:
                if isinstance(x, Tensor) and not isinstance(x, Placeholder):
                    self._context.pending.before_write(x)
        if Placeholder not in types:
            deferred = None if producer is None else producer(self._context, *args, **kwargs)
            return func(*args, **kwargs) if deferred is None else deferred
        deferred = index_put(self._context, *args, **kwargs) if func is torch.ops.aten.index_put.default else None
        return apply(func, args, kwargs, functools.partial(self._call, func)) if deferred is None else deferred

    def _call(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__torch_dispatch__(func, (), args, kwargs)


@functools.cache  # the hash of an operation is the slowest part of a lookup
def _lookup(func: Any) -> tuple[Any, list[tuple[int, str]]]:
    """Return the producer, and the arguments that the operation writes into."""
    arguments = enumerate(schema(func).arguments)
    written = [(place, x.name) for place, x in arguments if x.alias_info is not None and x.alias_info.is_write]
    return PRODUCERS.get(func), written
