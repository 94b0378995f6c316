"""Rules for functions that ``torch.func.vmap`` cannot batch, batches wrongly, or batches in a loop over samples.

There is one file per family of functions: ``products.py``, ``nn_functional.py``, ``recurrent.py``, …; a rule for
``F.grid_sample`` would go to ``nn_functional.py``. Each of these files has ``RULES``,
from a function of torch to its replacement: a composition of functions that vmap batches well. Some files also have
``FIRST_DERIVATIVE_RULES``: replacements with a hand-written gradient, for losses that are differentiated only once.
"""

from __future__ import annotations

import functools
from types import TracebackType

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from persample._torch import missing
from persample.utils.numerics import storage_key
from persample.utils.tracing import is_batched
from persample.utils.trees import Leaf, Tree, flatten
from persample.vmap_rules import attention, effects, indexing, nn_functional, products, recurrent
from persample.vmap_rules.effects import is_pure, is_refusal, refuse_writes, swallowed
from persample.vmap_rules.levels import (
    Args,
    DifferentiatedBy,
    Function,
    Options,
    Rules,
    SecondDerivativeError,
    is_differentiated_once,
)

_FILES = attention, effects, indexing, nn_functional, products, recurrent


def _table(name: str) -> Rules:
    return {function: rule for file in _FILES for function, rule in getattr(file, name, {}).items()}


_RULES, _FIRST_DERIVATIVE_RULES = _table("RULES"), _table("FIRST_DERIVATIVE_RULES")
_RANKS = {torch.channels_last: 4, torch.channels_last_3d: 5}  # the axes of what a memory format is for
MISSING = missing(_RULES)  # names of functions that the installed torch does not have
# Functions whose results have memory of their own: what a loss may write into, such as masks.
MAKERS = {
    *("zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "tensor", "eye", "arange", "clone", "triu", "tril"),
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
        # Copies x[i] where one sample alone has views, with the memory of x; and that of each x which lacks a write.
        self._rows: dict[int, tuple[Tensor, int]] = {}
        self._stale: set[int] = set()
        self._refusal: Exception | None = None

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Options | None = None) -> Tree:
        """Call the rule of a function of torch, or the function itself if it has none."""
        kwargs = kwargs or {}
        try:
            if kwargs or not is_pure(func):
                refuse_writes(func, args, kwargs)
            if self._rows:
                self.check_rows(func, args, kwargs)
            return self.replaced(func, args, kwargs)
        except Exception as error:
            if func in indexing.OF_SCALARS and (result := indexing.of_scalar(func, *args, **kwargs)) is not None:
                return result
            if is_refusal(error, func, args, kwargs):
                self._refusal = self._refusal or error
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the context; raise a ``LossError`` if the loss caught an error that is due to vmap, and went on."""
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        refusal, self._refusal = self._refusal, None  # its traceback refers to this mode
        if refusal is not None and (wrong := swallowed(refusal, error)):
            raise wrong from None

    def replaced(self, func: Function, args: Args, kwargs: Options) -> Tree:
        """Call the rule of a function that writes into nothing that the loss must leave alone, or the function."""
        rank = _RANKS.get(kwargs["memory_format"]) if args and "memory_format" in kwargs else None
        if rank and is_batched(args[0]) and args[0].ndim == rank and func is not Tensor.is_contiguous:
            kwargs = {name: x for name, x in kwargs.items() if name != "memory_format"}  # vmap has one more axis
        if kwargs.get("distance_function") is not None:  # torch calls it with this mode disabled
            kwargs = {**kwargs, "distance_function": functools.partial(self._call, kwargs["distance_function"])}
        if func in _FIRST_DERIVATIVE_RULES and is_differentiated_once(self._differentiated_by):
            return _FIRST_DERIVATIVE_RULES[func](*args, **kwargs)
        result = _RULES.get(func, func)(*args, **kwargs)
        if func is Tensor.__getitem__ and indexing.is_row(args[1]):
            self._rows[storage_key(result)] = result, storage_key(args[0])
        return result

    def check_rows(self, func: Function, args: Args, kwargs: Options) -> None:
        """Refuse to read x after a write into x[i] that x has not got: one sample alone would have a view there."""
        if func is Tensor.__setitem__ and isinstance(args[2], Tensor) and storage_key(args[2]) in self._rows:
            self._stale.discard(self._rows[storage_key(args[2])][1])  # as x[i] += 1 does in the end
        if self._stale and any(storage_key(x) in self._stale for x in flatten((args, kwargs))[0] if is_batched(x)):
            raise effects.lost_write()
        for x in effects.written_tensors(func, args, kwargs):
            if storage_key(x) in self._rows:
                self._stale.add(self._rows[storage_key(x)][1])

    def _call(self, function: Function, *args: Leaf, **kwargs: Leaf) -> Tree:
        with self:
            return function(*args, **kwargs)


class OwnTensors(VmapRules):
    """Gives every sample its own of a tensor that the loss makes for all samples, and then writes into.

    What is written shows as an error of vmap: the loss runs again, until no other write fails. All other tensors stay
    as the loss makes them, since it may keep them, and index by them.
    """

    def __init__(self) -> None:
        super().__init__(differentiated_by="any")
        self.written: set[int] = set()  # places among the tensors that the loss makes
        self.begin(None)

    def begin(self, like: Tensor | None) -> None:
        """Begin a run of the loss; ``like`` is any tensor that differs between samples."""
        self._like = like
        self._made: dict[int, tuple[Tensor, int]] = {}  # tensors, kept alive, with their places, by memory

    def replaced(self, func: Function, args: Args, kwargs: Options) -> Tree:
        """Call the rule of a function, or the function; note what it makes, and what it fails to write into."""
        try:
            result = super().replaced(func, args, kwargs)
        except RuntimeError:
            keys = set(map(storage_key, effects.written_tensors(func, args, kwargs)))
            self.written |= {place for key, (_, place) in self._made.items() if key in keys}
            raise
        is_made = getattr(func, "__name__", "") in MAKERS and "out" not in kwargs
        if self._like is None or not is_made or is_batched(result):
            return result
        place = len(self._made)
        self._made[storage_key(result)] = result, place
        return effects.of_each(result, self._like) if place in self.written else result


__all__ = ["MAKERS", "MISSING", "RULED", "OwnTensors", "SecondDerivativeError", "VmapRules"]
