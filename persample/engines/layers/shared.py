"""Parameters that all samples share, their transposes, and what the loss computes of them alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from persample._torch import add_batch_dim, temporarily_clear_interpreter_stack
from persample.utils.tracing import is_wrapped
from persample.utils.trees import flatten, unflatten
from persample.vmap_rules import VmapRules
from persample.vmap_rules.batched import is_batched

_SMALL = 2**12  # numbers in a vector of which the loss is given one copy per sample


class NotLayersError(Exception):
    """The loss is not made of layers alone: ``vmap(vjp(loss))`` differentiates it."""


class SharedParam(NamedTuple):
    """A parameter that all samples share, or its transpose.

    Args:
        tensor: the parameter or its transpose, plain.
        place: the parameter's place among all.
        transposed: whether the tensor is the transpose.
    """

    tensor: Tensor
    place: int
    transposed: bool = False


class SharedParams:
    """The parameters of one call, as the loss is given them.

    Small vectors are given as one copy per sample, for any use. Matrices and large vectors are shared by all samples:
    layers may have them as parameters, and they may be added to tensors of one value per sample. What a function
    computes of parameters alone is computed once, and is a further parameter. Any other use would cost B copies.

    Args:
        params: the parameters.
        size: B.
        level: the level of the vmap around the loss.
    """

    def __init__(self, params: Sequence[Tensor], size: int, level: int) -> None:
        self._size, self._level = size, level
        self.computed: dict[int, Tensor] = {}  # further parameters, by place, with the graph that begins at others
        self.copies: dict[int, Tensor] = {}  # by place, ``[B, *shape]``, made where the loss needs them
        self._shared: dict[int, SharedParam] = {}
        self.places: dict[int, int] = {}
        self._alive: list[Tensor] = []  # because an object made later may have the id of one that is gone
        with temporarily_clear_interpreter_stack():  # under which torch refuses to make leaves
            self.plain = [x.detach().requires_grad_() for x in params]
            self.given = [self._give(place) for place in range(len(self.plain))]

    def get(self, x: Any) -> SharedParam | None:
        """Return a shared parameter or its transpose, or None for any other value."""
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
        if x.ndim != 2:
            raise NotLayersError("the loss transposes a parameter that is no matrix")
        return (
            self.plain[param.place] if param.transposed else self._keep(SharedParam(x.T, param.place, transposed=True))
        )

    def add(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Add shared parameters to a tensor that has one value per sample anyway."""
        others = [x for x in args if isinstance(x, Tensor) and id(x) not in self.places and self.get(x) is None]
        if not any(map(is_batched, others)):
            raise NotLayersError("the loss adds a parameter to a tensor that all samples share")
        return func(*[x if self.get(x) is None else self._copy_of(x) for x in args], **kwargs)

    def compute(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of parameters alone, whose results are further parameters."""
        leaves, structure = flatten((args, kwargs))
        args, kwargs = unflatten([self._with_graph(x) for x in leaves], structure)
        with VmapRules(differentiated_by="any"):  # its backward pass will be batched
            results, structure = flatten(func(*args, **kwargs))
        return unflatten(
            [self._add_param(x) if isinstance(x, Tensor) and x.requires_grad else x for x in results], structure
        )

    def _with_graph(self, x: Any) -> Any:
        """Return an argument of a function as plain autograd is given it."""
        param, place = self.get(x), self.places.get(id(x))
        place = place if param is None else param.place
        if place is None:
            if isinstance(x, Tensor) and (x.requires_grad or is_wrapped(x)):
                raise NotLayersError("the loss calls a function with a parameter and other tensors, and it is no layer")
            return x
        plain = self.computed.get(place, self.plain[place])
        return plain.T if param is not None and param.transposed else plain

    def _add_param(self, value: Tensor) -> Tensor:
        if value.is_complex():
            raise NotLayersError("the loss computes complex numbers of a parameter")
        place = len(self.plain)
        self.computed[place] = value
        with temporarily_clear_interpreter_stack():
            self.plain.append(value.detach().requires_grad_())
            return self._give(place)

    def _give(self, place: int) -> Tensor:
        x = self.plain[place]
        given = self._keep(SharedParam(x, place)) if x.ndim > 1 or x.numel() > _SMALL else self._copy(place)
        self.places[id(given)] = place
        self._alive.append(given)
        return given

    def _copy_of(self, x: Tensor) -> Tensor:
        param = self._shared[id(x)]
        if param.transposed:
            raise NotLayersError("the loss adds the transpose of a parameter")
        with temporarily_clear_interpreter_stack():
            return self._copy(param.place)

    def _copy(self, place: int) -> Tensor:
        if place not in self.copies:
            plain = self.plain[place].detach()
            self.copies[place] = plain.expand(self._size, *plain.shape).requires_grad_()
        return add_batch_dim(self.copies[place], 0, self._level)

    def _keep(self, param: SharedParam) -> Tensor:
        self._shared[id(param.tensor)] = param
        return param.tensor
