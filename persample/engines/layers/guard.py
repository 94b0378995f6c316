"""What a loss of layers must not do, seen function by function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch.nn import functional as F

from persample.engines.layers.functions import adds, asks, only_computes, written
from persample.engines.layers.interceptor import LayerInterceptor
from persample.outputs import memory
from persample.vmap_rules import rewritten
from persample.vmap_rules.rows import is_batched, unwrapped


class NotLayersError(Exception):
    """A parameter of layers is used by something else, too, or what torch.func refuses is to be refused."""


class LayerGuard(rewritten):
    """Refuses what is not as it is between torch.func's two transforms: asking what has a gradient, and writing.

    Args:
        caught: what stands for layers.
        given: what the loss is called with.
        repeated: parameters of which every sample was given its own. Matrices among them, and parts of these, may only
            be added to what differs anyway: all that is made of them is there for every sample.
    """

    def __init__(self, caught: LayerInterceptor, given: Sequence[Any], repeated: Iterable[Tensor]) -> None:
        super().__init__({F.linear: caught, F.embedding: caught.embedding})
        self.has_refused = False
        self._given = given
        self._repeated = {id(x): x for x in repeated}
        self._matrices = {key: x for key, x in self._repeated.items() if x.ndim > 1}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, or its replacement, if it may be called here.

        Args:
            func: a function of torch.
            types: the subclasses of tensors among the arguments.
            args: its arguments.
            kwargs: its keyword arguments.

        Returns:
            What the function returns.

        Raises:
            NotLayersError: if it may not.
        """
        if (kwargs or not only_computes(func)) and not self._may_call(func, args, kwargs or {}):
            self._refuse()
        if not self._matrices or self._matrices.keys().isdisjoint(map(id, _flat(args, kwargs or {}))):
            return super().__torch_function__(func, types, args, kwargs)
        part = func is Tensor.__getitem__ and all(isinstance(x, _PLACES) for x in _flat(args[1:], {}))
        if not (part or func in _READING or (adds(func) and any(map(self._differs, args)))):
            self._refuse()
        out = super().__torch_function__(func, types, args, kwargs)
        if part:
            self._matrices[id(out)] = out
        return out

    def _refuse(self) -> NoReturn:
        self.has_refused = True  # a loss may catch the error
        raise NotLayersError

    def _may_call(self, func: Any, args: Any, kwargs: Any) -> bool:
        return not asks(func) and all(map(self._is_own, written(func, args, kwargs)))

    def _differs(self, x: Any) -> bool:
        given = id(x) in self._repeated or id(x) in self._matrices
        return isinstance(x, Tensor) and not given and is_batched(x)

    def _is_own(self, x: Tensor) -> bool:
        """Return whether the loss computed a tensor itself, all samples of it."""
        return is_batched(x) and memory(unwrapped(x)) not in {memory(unwrapped(y)) for y in self._given}


_PLACES = (int, slice, type(None), type(Ellipsis))
_READING = {Tensor.size, Tensor.dim, Tensor.__len__, *(getattr(Tensor, name).__get__ for name in ("shape", "ndim"))}


def _flat(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for x in (*args, *kwargs.values()):
        if isinstance(x, list | tuple):
            yield from x
        else:
            yield x
