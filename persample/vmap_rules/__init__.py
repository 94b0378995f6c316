"""Rules for functions that ``torch.func.vmap`` cannot batch, batches wrongly, or batches in a loop over samples.

There is one file per family of functions: ``products.py``, ``nn_functional.py``, ``recurrent.py``, …; a rule for
``F.grid_sample`` would go to ``nn_functional.py``. Each of these files has ``RULES``,
from a function of torch to its replacement: a composition of functions that vmap batches well. Some files also have
``FIRST_DERIVATIVE_RULES``: replacements with a hand-written gradient, for losses that are differentiated only once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from persample._torch import missing
from persample.utils.tracing import is_batched
from persample.vmap_rules import attention, effects, indexing, nn_functional, products, recurrent
from persample.vmap_rules.effects import is_pure, is_refusal, refuse_writes, swallowed
from persample.vmap_rules.levels import DifferentiatedBy, SecondDerivativeError, is_differentiated_once

_FILES = attention, effects, indexing, nn_functional, products, recurrent


def _table(name: str) -> dict[Any, Callable[..., Any]]:
    return {function: rule for file in _FILES for function, rule in getattr(file, name, {}).items()}


_RULES, _FIRST_DERIVATIVE_RULES = _table("RULES"), _table("FIRST_DERIVATIVE_RULES")
_RANKS = {torch.channels_last: 4, torch.channels_last_3d: 5}  # the axes of what a memory format is for
MISSING = missing(_RULES)  # names of functions that the installed torch does not have
# Functions whose results have memory of their own: what a loss may write into, such as masks.
MAKERS = {
    *("zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "tensor", "eye", "clone", "triu", "tril"),
}
RULED = _RULES.keys() | _FIRST_DERIVATIVE_RULES.keys()


class VmapRules(TorchFunctionMode):
    """A context that replaces functions of torch by their rules; it is entered inside of ``vmap``, around the loss.

    The replacements are exact: results and gradients equal those of torch, up to the order of summation. See
    ``levels.py`` about ``differentiated_by``.
    """

    def __init__(self, *, differentiated_by: DifferentiatedBy = "torch.func") -> None:
        super().__init__()
        self._differentiated_by = differentiated_by
        self._refusal: Exception | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the rule of a function of torch, or the function itself if it has none."""
        try:
            if kwargs or not is_pure(func):
                refuse_writes(func, args, kwargs or {})
            return self.replaced(func, args, kwargs)
        except Exception as error:
            result = (
                indexing.of_scalar(func, *args, **(kwargs or {})) if func in indexing.OF_SCALARS else NotImplemented
            )
            if result is not NotImplemented:
                return result
            if is_refusal(error, func, args, kwargs):
                self._refusal = self._refusal or error
            raise

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Leave the context; raise a ``LossError`` if the loss caught an error that is due to vmap, and went on."""
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        refusal, self._refusal = self._refusal, None  # its traceback refers to this mode
        if refusal is not None and (wrong := swallowed(refusal, error)):
            raise wrong from None

    def replaced(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call the rule of a function that writes into nothing that the loss must leave alone, or the function."""
        rank = _RANKS.get(kwargs.get("memory_format")) if kwargs and args else None
        if rank and is_batched(args[0]) and args[0].ndim == rank and func is not Tensor.is_contiguous:
            kwargs = {name: x for name, x in kwargs.items() if name != "memory_format"}  # vmap has one more axis
        if kwargs and kwargs.get("distance_function") is not None:  # torch calls it with this mode disabled
            kwargs = {**kwargs, "distance_function": functools.partial(self._call, kwargs["distance_function"])}
        if func in _FIRST_DERIVATIVE_RULES and is_differentiated_once(self._differentiated_by):
            return _FIRST_DERIVATIVE_RULES[func](*args, **(kwargs or {}))
        return _RULES.get(func, func)(*args, **(kwargs or {}))

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self:
            return function(*args, **kwargs)


class OwnTensors(VmapRules):
    """Gives every sample a tensor of its own where the loss makes one for all, so that the loss may write into it."""

    def __init__(self) -> None:
        super().__init__(differentiated_by="any")
        self.like: Tensor | None = None  # one that differs between samples

    def replaced(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call the rule of a function, or the function; what it made for all samples becomes one tensor for each."""
        result = super().replaced(func, args, kwargs)
        if self.like is None or getattr(func, "__name__", "") not in MAKERS:
            return result
        return effects.of_each(result, self.like)


__all__ = ["MAKERS", "MISSING", "RULED", "OwnTensors", "SecondDerivativeError", "VmapRules"]
