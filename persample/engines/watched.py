"""What a loss does, seen function by function: whether it is one of linear layers, and what it must not do as such."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from persample.output import memory
from persample.rewrites import Caught, rewritten
from persample.rewrites.named import asks, name_of, only_computes, written
from persample.rewrites.rows import is_batched, unwrapped


class NotDirectError(Exception):
    """A matrix is used by something else than a linear layer, or what torch.func refuses is to be refused."""


class Uses(rewritten):
    """Notes what a loss does with the matrices among its parameters, on the long way."""

    def __init__(self) -> None:
        super().__init__()
        self._matrices: set[int] = set()
        self._weights: set[int] = set()
        self._others = False

    def of(self, params: Sequence[Tensor]) -> Uses:
        """Return itself, about to see a loss called.

        Args:
            params: what the loss is called with.
        """
        self._matrices = {id(x) for x in params if x.ndim == 2}
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, or its replacement, and look at its arguments.

        Args:
            func: a function of torch.
            types: the subclasses of tensors among the arguments.
            args: its arguments.
            kwargs: its keyword arguments.

        Returns:
            What the function returns.
        """
        result = super().__torch_function__(func, types, args, kwargs)
        given = {name: id(x) for name, x in [*enumerate(args), *(kwargs or {}).items()]}
        if func is F.linear:
            self._weights.add(given.pop("weight", 0) or given.pop(1, 0))
        makes = isinstance(result, Tensor) and name_of(func) != "detach"  # a shape is no use
        listed = (id(y) for x in args if isinstance(x, list | tuple) for y in x)
        self._others |= asks(func) or (makes and not self._matrices.isdisjoint((*given.values(), *listed)))
        return result

    @property
    def are_layers(self) -> bool:
        """Whether all matrices are weights of linear layers, and nothing else, as far as names tell."""
        return self._matrices <= self._weights and not self._others


class Watching(rewritten):
    """Refuses what is not as it is between torch.func's two transforms: asking what has a gradient, and writing.

    Args:
        caught: what stands for linear layers.
        given: what the loss is called with.
    """

    def __init__(self, caught: Caught, given: Sequence[Any]) -> None:
        super().__init__({F.linear: caught})
        self._given = given

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
        return super().__torch_function__(func, types, args, kwargs)

    def _may_call(self, func: Any, args: Any, kwargs: Any) -> bool:
        return not asks(func) and all(map(self._is_own, written(func, args, kwargs)))

    def _is_own(self, x: Tensor) -> bool:
        """Return whether the loss computed a tensor itself, all samples of it."""
        return is_batched(x) and memory(unwrapped(x)) not in {memory(unwrapped(y)) for y in self._given}
