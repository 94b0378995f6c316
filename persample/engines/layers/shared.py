"""Parameters that all samples share, their transposes, and what the loss computes of them alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from persample._torch import (
    add_batch_dim,
    peek_interpreter_stack,
    temporarily_clear_interpreter_stack,
    view_base,
)
from persample.utils.tracing import is_wrapped
from persample.utils.trees import TreeSpec, flatten, unflatten
from persample.vmap_rules import VmapRules

_SMALL = 2**12  # numbers in a vector of which the loss is given one copy per sample


class NotLayersError(Exception):
    """The loss is left to ``vmap(vjp(loss))``."""


class Vmap(NamedTuple):
    """The vmap around the loss.

    Args:
        level: its level.
        size: B.
    """

    level: int
    size: int

    @property
    def is_innermost(self) -> bool:
        """Whether no other transform, which the loss has called, is active."""
        return peek_interpreter_stack().level() == self.level


class SharedParam(NamedTuple):
    """A parameter that all samples share, or its transpose.

    Args:
        tensor: the parameter or its transpose, plain, as the loss is given it.
        place: the parameter's place among all.
        transposed: whether the tensor is the transpose.
    """

    tensor: Tensor
    place: int
    transposed: bool = False


class Part(NamedTuple):
    """A matrix that is a part of a parameter: of its numbers, seen as a larger matrix.

    Args:
        of: the parameter's place.
        rows: the rows of the larger matrix.
        columns: its columns.
        row: the first row of the part.
        column: its first column.
    """

    of: int
    rows: int
    columns: int
    row: int
    column: int


class SharedParams:
    """The parameters of one call, as the loss is given them.

    Small vectors are given as one copy per sample, for any use. Matrices and large vectors are shared by all samples,
    and are expanded to copies only where that takes no longer. What a function computes of them alone is computed once,
    and is a further parameter. Beside them, copies stand for the vector.

    Args:
        params: the parameters.
        vmap: the vmap around the loss.
    """

    def __init__(self, params: Sequence[Tensor], vmap: Vmap) -> None:
        self._vmap = vmap
        self.computed: dict[int, Tensor] = {}  # further parameters, by place, with the graph that begins at others
        self.parts: dict[int, Part] = {}  # of computed ones: where in a parameter they lie, if they are parts of it
        self.expanded: dict[int, Tensor] = {}  # copies by place, ``[B, *shape]``, made where the loss needs them
        self._shared: dict[int, SharedParam] = {}
        self._copies: dict[int, tuple[int, Tensor]] = {}  # by id: the place of the vector, and its copies, kept alive
        with temporarily_clear_interpreter_stack():  # under which torch refuses to make leaves
            self.plain = [x.detach().requires_grad_() for x in params]
            self.values = [x.detach() for x in params]  # as layers read them: a gradient of ``plain`` is of another use
        self.given = [self._give(place) for place in range(len(self.plain))]

    def get(self, x: Any) -> SharedParam | None:
        """Return a shared parameter or its transpose, or None for any other value."""
        return self._shared.get(id(x))

    def place_of(self, x: Any) -> int | None:
        """Return the place of a parameter or of its copies, or None for any other value, a transpose among them."""
        param = self.get(x)
        if param is None or param.transposed:
            return self._copies[id(x)][0] if id(x) in self._copies else None
        return param.place

    def are_among(self, values: Sequence[Any]) -> bool:
        """Return whether there is a shared parameter among values, or in lists among them."""
        if not self._shared.keys().isdisjoint(map(id, values)):
            return True
        lists = [x for x in values if isinstance(x, (list, tuple))]
        return bool(lists) and any(id(y) in self._shared for x in lists for y in x)

    def transpose(self, x: Tensor) -> Tensor:
        """Return the transpose of a shared matrix."""
        param = self._shared[id(x)]
        if x.ndim != 2:
            raise NotLayersError("the loss transposes a parameter that is no matrix")
        return self._keep(SharedParam(x.T, param.place, not param.transposed))

    def copy(self, param: SharedParam) -> Tensor:
        """Return one copy of a shared parameter per sample."""
        copy = self._copy(param.place)
        return copy.mT if param.transposed else copy

    def compute(self, func: Callable[..., Any], leaves: Sequence[Any], structure: TreeSpec) -> Any:
        """Call a function of parameters alone, whose results are further parameters."""
        args, kwargs = unflatten([self._with_graph(x) for x in leaves], structure)
        with VmapRules(differentiated_by="any"):  # the backward pass will be batched
            results, results_structure = flatten(func(*args, **kwargs))
        # A leaf is no result: the deep copy of a parameter.
        computed = [isinstance(x, Tensor) and x.requires_grad and not x.is_leaf for x in results]
        given = [self._add(x) if yes else x for x, yes in zip(results, computed, strict=True)]
        return unflatten(given, results_structure)

    def _with_graph(self, x: Any) -> Any:
        """Return an argument of a function as plain autograd is given it."""
        param = self.get(x)
        place = self.place_of(x) if param is None else param.place
        if place is None:
            return x
        plain = self.computed.get(place, self.plain[place])
        return plain.mT if param is not None and param.transposed else plain

    def _add(self, value: Tensor) -> Tensor:
        if value.is_complex() or is_wrapped(value):
            raise NotLayersError("the loss computes complex or random numbers of a parameter")
        place = len(self.plain)
        self.computed[place] = value
        if (part := self._part(value)) is not None:
            self.parts[place] = part
        with temporarily_clear_interpreter_stack():
            self.plain.append(value.detach().requires_grad_())
            self.values.append(value.detach())
        return self._give(place)

    def _part(self, value: Tensor) -> Part | None:
        """Return where a matrix lies in a parameter, or None if it is no such view."""
        base = view_base(value)
        of = next((place for place in range(len(self.given)) if self.plain[place] is base), None)
        if of is None or value.ndim != 2 or value.stride(1) != 1 or not base.is_contiguous() or not value.numel():
            return None
        width = value.stride(0)
        row, column = divmod(value.storage_offset() - base.storage_offset(), max(width, 1))
        fits = width and base.numel() % width == 0 and column + value.shape[1] <= width
        return Part(of, base.numel() // width, width, row, column) if fits else None

    def _give(self, place: int) -> Tensor:
        x = self.plain[place]
        if x.ndim > 1 or x.numel() > _SMALL or place in self.computed:
            return self._keep(SharedParam(x, place))
        copy = self._copy(place)
        self._copies[id(copy)] = place, copy
        return copy

    def _copy(self, place: int) -> Tensor:
        if place not in self.expanded:
            with temporarily_clear_interpreter_stack():
                value = self.values[place]
                self.expanded[place] = value.expand(self._vmap.size, *value.shape).requires_grad_()
        return add_batch_dim(self.expanded[place], 0, self._vmap.level)

    def _keep(self, param: SharedParam) -> Tensor:
        self._shared[id(param.tensor)] = param
        return param.tensor
