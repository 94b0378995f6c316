"""The dispatch mode under which a backward pass leaves the last contraction of weight gradients undone."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from persample._torch import UnguardedDispatchMode, schema
from persample.cpu.mode import FASTER
from persample.engines.deferred.numbering import Numbering
from persample.engines.deferred.placeholder import Placeholder, Watch, memory, placeholder
from persample.engines.deferred.producers import PRODUCERS, index_put
from persample.engines.deferred.rules import act
from persample.engines.deferred.terms import DeferredTerm
from persample.factors import cost_model


class Deferral(UnguardedDispatchMode):
    """Products of back-propagated signals and inputs become placeholders wherever that is the better form.

    Under ``torch.func`` a dispatch mode sees the operations that vmap has batched already. Which of them compute
    gradients of parameters is not known yet, nor does it matter: a placeholder that something else needs is computed.

    Args:
        uses: the operations of ``Factor`` that the reductions call.
        params: the parameters: products with them carry signals further and are never deferred.
    """

    def __init__(self, uses: Iterable[str], params: Iterable[Tensor]) -> None:
        super().__init__()
        self.numbering = Numbering()
        self._uses = frozenset(uses)
        self._params = {memory(param) for param in params}
        self._watch = Watch()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Defer a product, apply a rule to placeholders, or let the operation be.

        Args:
            func: an operation of aten.
            types: the subclasses of tensors among the arguments.
            args: its arguments.
            kwargs: its keyword arguments.

        Returns:
            What the operation returns.
        """
        kwargs = kwargs or {}
        if self._watch.is_filling:
            return func(*args, **kwargs)
        mutable, creator, computed = _known(func)
        if mutable:
            for written in _written(func, args, kwargs):
                self._watch.before_write(written)
        if Placeholder not in types:
            deferred = None if creator is None else creator(self, *args, **kwargs)
            return (func if types else computed)(*args, **kwargs) if deferred is None else deferred
        deferred = index_put(self, *args, **kwargs) if func is torch.ops.aten.index_put.default else None
        return act(func, args, kwargs, functools.partial(self._call, func)) if deferred is None else deferred

    def _call(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__torch_dispatch__(func, (), args, kwargs)

    def __exit__(self, *error: Any) -> None:
        """Forget what was numbered."""
        self.numbering.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def keeps(self, steps: int, written: int, *operands: Tensor) -> bool:
        """Return whether a product is better left undone.

        Args:
            steps: T.
            written: numbers in the product.
            *operands: what is multiplied.
        """
        real = all(x.dtype.is_floating_point and x.dtype == operands[0].dtype and x.numel() for x in operands)
        if not written or not real or any(memory(x) in self._params for x in operands):
            return False
        return cost_model.prefers_factored(self._uses, steps, written, sum(x.numel() for x in operands))

    def make(
        self, terms: tuple[DeferredTerm, ...], shape: Any, dtype: torch.dtype, device: torch.device
    ) -> Placeholder:
        """Return the placeholder of some terms.

        Args:
            terms: what it is the sum of.
            shape: its shape.
            dtype: its dtype.
            device: where it is.
        """
        return placeholder(terms, shape, dtype, device, self._watch)


@functools.cache  # hashing an operation is the dearest part of looking it up
def _known(func: Any) -> tuple[bool, Any, Any]:
    return schema(func).is_mutable, PRODUCERS.get(func), FASTER.get(func, func)


@functools.cache
def _writes(func: Any) -> tuple[list[int], list[str]]:
    arguments = list(enumerate(schema(func).arguments))
    places = [place for place, x in arguments if x.alias_info is not None and x.alias_info.is_write]
    return places, [arguments[place][1].name for place in places]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation writes into. Placeholders are computed first."""
    places, names = _writes(func)
    written = [args[place] for place in places if place < len(args)] + [kwargs[x] for x in names if x in kwargs]
    flat = [x for group in written for x in (group if isinstance(group, list | tuple) else [group])]
    return [x for x in flat if isinstance(x, Tensor) and not isinstance(x, Placeholder)]
