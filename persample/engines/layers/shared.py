"""Parameters that all samples share, and views of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from persample.vmap_rules.rows import is_batched

_SMALL = 2**12  # numbers in a vector of which the loss is given one copy per sample
_CONSTANT_INDICES = (int, slice, type(None), type(Ellipsis))


class NotLayersError(Exception):
    """The loss is not made of layers alone: ``vmap(vjp(loss))`` differentiates it."""


class SharedParam(NamedTuple):
    """A parameter that all samples share, or a view of one.

    Args:
        tensor: the parameter or view.
        copy: one copy of it per sample, or None: it may not be added.
        place: the parameter's place among all, or None: a layer cannot have the view as its weight.
        transposed: whether the view is the parameter's transpose.
    """

    tensor: Tensor
    copy: Tensor | None
    place: int | None
    transposed: bool = False


class SharedParams:
    """The parameters of one call, as the loss is given them.

    Small vectors are given as one copy per sample, for any use. Matrices and large vectors are shared by all samples:
    layers may have them as parameters, and they may be added to tensors of one value per sample. Any other use would
    cost B copies.

    Args:
        plain: the parameters.
        copies: one copy of each per sample, under vmap.
    """

    def __init__(self, plain: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        self.plain = plain
        self.given = [x if x.ndim > 1 or x.numel() > _SMALL else copy for x, copy in zip(plain, copies, strict=True)]
        self.places = {id(x): place for place, x in enumerate(self.given)}
        self._shared = {
            id(x): SharedParam(x, copy, place)
            for place, (x, copy) in enumerate(zip(plain, copies, strict=True))
            if x is self.given[place]
        }

    def get(self, x: Any) -> SharedParam | None:
        """Return a shared parameter or view, or None for any other value."""
        return self._shared.get(id(x))

    def are_among(self, values: Iterable[Any]) -> bool:
        """Return whether there is a shared parameter among values, or in lists among them."""
        for x in values:
            if id(x) in self._shared or (isinstance(x, list | tuple) and any(id(y) in self._shared for y in x)):
                return True
        return False

    def transpose(self, x: Tensor) -> Tensor:
        """Return the transpose of a shared matrix."""
        param = self._shared[id(x)]
        if param.place is None or x.ndim != 2:
            raise NotLayersError("the loss transposes a parameter that is no matrix")
        if param.transposed:
            return self.plain[param.place]
        return self._keep(SharedParam(x.T, None, param.place, transposed=True))

    def part(self, x: Tensor, index: Any) -> Tensor:
        """Return ``x[index]`` of a shared parameter, one copy per sample."""
        param = self.get(x)
        indices = index if isinstance(index, tuple) else (index,)
        if param is None or param.copy is None or not all(isinstance(i, _CONSTANT_INDICES) for i in indices):
            raise NotLayersError("the loss indexes a parameter with a tensor, or with a parameter")
        part = param.copy[index]
        return self._keep(SharedParam(part, part, None))

    def add(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Add shared parameters to a tensor that has one value per sample anyway."""
        copies = [x if (param := self.get(x)) is None else param.copy for x in args]
        others = [x for x in args if isinstance(x, Tensor) and id(x) not in self.places and self.get(x) is None]
        if not any(map(is_batched, others)) or any(x is None for x in copies):
            raise NotLayersError("the loss adds a parameter to a tensor that all samples share")
        return func(*copies, **kwargs)

    def _keep(self, param: SharedParam) -> Tensor:
        self._shared[id(param.tensor)] = param
        return param.tensor
