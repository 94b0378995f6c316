"""What a loss of layers must not do, seen function by function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from persample.output import memory
from persample.rewrites import Caught, rewritten
from persample.rewrites.named import adds, asks, only_computes, written
from persample.rewrites.rows import is_batched, unwrapped


class NotDirectError(Exception):
    """A parameter of layers is used by something else, too, or what torch.func refuses is to be refused."""


class Watching(rewritten):
    """Refuses what is not as it is between torch.func's two transforms: asking what has a gradient, and writing.

    Args:
        caught: what stands for layers.
        given: what the loss is called with.
        repeated: matrices of which every sample was given its own; products with them would be slow.
    """

    def __init__(self, caught: Caught, given: Sequence[Any], repeated: Iterable[Tensor]) -> None:
        super().__init__({F.linear: caught, F.embedding: caught.embedding})
        self._given = given
        self._repeated = set(map(id, repeated))

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
            NotDirectError: if it may not.
        """
        if (kwargs or not only_computes(func)) and not self._may_call(func, args, kwargs or {}):
            raise NotDirectError
        if self._repeated and not self._repeated.isdisjoint(map(id, args)) and not adds(func):
            raise NotDirectError
        return super().__torch_function__(func, types, args, kwargs)

    def _may_call(self, func: Any, args: Any, kwargs: Any) -> bool:
        return not asks(func) and all(map(self._is_own, written(func, args, kwargs)))

    def _is_own(self, x: Tensor) -> bool:
        """Return whether the loss computed a tensor itself, all samples of it."""
        return is_batched(x) and memory(unwrapped(x)) not in {memory(unwrapped(y)) for y in self._given}
