"""Parameters that all samples share, and views of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from persample._torch import add_batch_dim, temporarily_clear_interpreter_stack
from persample.vmap_rules.batched import is_batched

_SMALL = 2**12  # numbers in a vector of which the loss is given one copy per sample
_CONSTANT_INDICES = (int, slice, type(None), type(Ellipsis))


class NotLayersError(Exception):
    """The loss is not made of layers alone: ``vmap(vjp(loss))`` differentiates it."""


class SharedParam(NamedTuple):
    """A parameter that all samples share, or a view of one.

    Args:
        tensor: the parameter or view, plain, or a part of its copies.
        place: the parameter's place among all, or None: the view is a part.
        transposed: whether the view is the parameter's transpose.
    """

    tensor: Tensor
    place: int | None
    transposed: bool = False


class SharedParams:
    """The parameters of one call, as the loss is given them.

    Small vectors are given as one copy per sample, for any use. Matrices and large vectors are shared by all samples:
    layers may have them as parameters, and they may be added to tensors of one value per sample. Any other use would
    cost B copies.

    Args:
        params: the parameters.
        size: B.
        level: the level of the vmap around the loss.
    """

    def __init__(self, params: Sequence[Tensor], size: int, level: int) -> None:
        self._size, self._level = size, level
        self.copies: dict[int, Tensor] = {}  # by place, ``[B, *shape]``, made where the loss needs them
        self._shared: dict[int, SharedParam] = {}
        with temporarily_clear_interpreter_stack():  # under which torch refuses to make leaves
            self.plain = [x.detach().requires_grad_() for x in params]
            self.given = [
                self._keep(SharedParam(x, place)) if x.ndim > 1 or x.numel() > _SMALL else self._copy(place)
                for place, x in enumerate(self.plain)
            ]
        self.places = {id(x): place for place, x in enumerate(self.given)}

    def get(self, x: Any) -> SharedParam | None:
        """Return a shared parameter or view, or None for any other value."""
        return self._shared.get(id(x))

    def place_of(self, x: Any) -> int:
        """Return the place of a parameter, which is given to a layer as it is."""
        if id(x) not in self.places:
            raise NotLayersError("the loss calls a layer with a weight or bias that is no parameter")
        return self.places[id(x)]

    def are_among(self, values: Iterable[Any]) -> bool:
        """Return whether there is a shared parameter among values, or in lists among them."""
        for x in values:
            if id(x) in self._shared or (isinstance(x, (list, tuple)) and any(id(y) in self._shared for y in x)):
                return True
        return False

    def transpose(self, x: Tensor) -> Tensor:
        """Return the transpose of a shared matrix."""
        param = self._shared[id(x)]
        if param.place is None or x.ndim != 2:
            raise NotLayersError("the loss transposes a parameter that is no matrix")
        return (
            self.plain[param.place] if param.transposed else self._keep(SharedParam(x.T, param.place, transposed=True))
        )

    def part(self, x: Tensor, index: Any) -> Tensor:
        """Return ``x[index]`` of a shared parameter, one copy per sample."""
        indices = index if isinstance(index, tuple) else (index,)
        if self.get(x) is None or not all(isinstance(i, _CONSTANT_INDICES) for i in indices):
            raise NotLayersError("the loss indexes a parameter with a tensor, or with a parameter")
        return self._keep(SharedParam(self._copy_of(x)[index], None))

    def add(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Add shared parameters to a tensor that has one value per sample anyway."""
        others = [x for x in args if isinstance(x, Tensor) and id(x) not in self.places and self.get(x) is None]
        if not any(map(is_batched, others)):
            raise NotLayersError("the loss adds a parameter to a tensor that all samples share")
        return func(*[x if self.get(x) is None else self._copy_of(x) for x in args], **kwargs)

    def _copy_of(self, x: Tensor) -> Tensor:
        param = self._shared[id(x)]
        if param.transposed:
            raise NotLayersError("the loss adds or indexes the transpose of a parameter")
        with temporarily_clear_interpreter_stack():
            return x if param.place is None else self._copy(param.place)

    def _copy(self, place: int) -> Tensor:
        if place not in self.copies:
            plain = self.plain[place].detach()
            self.copies[place] = plain.expand(self._size, *plain.shape).requires_grad_()
        return add_batch_dim(self.copies[place], 0, self._level)

    def _keep(self, param: SharedParam) -> Tensor:
        self._shared[id(param.tensor)] = param
        return param.tensor
