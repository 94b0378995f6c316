"""Parameters that all samples share, their transposes, and what the loss computes of them alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.fx.immutable_collections import immutable_list

from persample._torch import (
    add_batch_dim,
    maybe_get_bdim,
    maybe_get_level,
    temporarily_clear_interpreter_stack,
    view_base,
)
from persample.utils.tracing import is_wrapped, unwrapped_once
from persample.utils.trees import Leaf, Tree, TreeSpec, flatten, unflatten
from persample.vmap_rules import VmapRules

LISTS = {list, tuple, immutable_list}  # the last in captured graphs
_SMALL = 2**12  # elements of a vector up to which the loss receives one copy per sample


class NotLayersError(Exception):
    """The loss is left to ``vmap(vjp(loss))``, for a reason, and perhaps for the parameters at some places."""

    def __init__(self, reason: str, *places: int) -> None:
        super().__init__(reason)
        self.places = places


class Vmap(NamedTuple):
    """The vmap around the loss, of ``size`` samples."""

    level: int
    size: int

    def rows(self, x: Leaf) -> tuple[Tensor, list[int]] | None:
        """Return the plain tensor of all samples, and the levels whose batch axes are its first, the outermost first.

        None if the vmap does not batch the value, or if anything but vmaps that the loss has called acts on it, too.
        ``levels.batched`` is the inverse.
        """
        levels: list[int] = []
        axes: list[int] = []
        while isinstance(x, Tensor) and (axis := maybe_get_bdim(x)) >= 0:
            levels.insert(0, maybe_get_level(x))
            axes.insert(0, axis)
            x = unwrapped_once(x)
        if not levels or levels[0] != self.level or is_wrapped(x):
            return None
        for done, axis in enumerate(axes):
            x = x.movedim(axis + done, done) if axis else x
        return x, levels

    def all_rows(self, x: Tensor) -> Tensor:
        """Return the values of all samples of a result of the loss, ``[B, ...]``."""
        axis = maybe_get_bdim(x)
        return unwrapped_once(x).movedim(axis, 0) if axis >= 0 else x.expand(self.size, *x.shape)


class SharedParam(NamedTuple):
    """The tensor that the loss receives for a parameter that all samples share, or for its transpose."""

    tensor: Tensor
    place: int
    transposed: bool = False


class Part(NamedTuple):
    """A part of a parameter, whose elements are seen as a matrix: it begins at ``(row, column)``."""

    of: int
    rows: int
    columns: int
    row: int
    column: int


class SharedParams:
    """The parameters of one call, and the tensors that the loss receives for them.

    A small vector is one copy per sample, for any use. Matrices and large vectors are shared by all samples, and are
    expanded to copies only where that takes no longer. What a function computes of them alone is computed once,
    and is a further parameter. Beside them, copies stand for the vector.
    """

    def __init__(self, params: Sequence[Tensor], vmap: Vmap) -> None:
        self._vmap = vmap
        self.computed: dict[int, Tensor] = {}  # further parameters, by place, with the graph that begins at others
        self.parts: dict[int, Part] = {}  # of computed ones: where in a parameter they lie, if they are parts of it
        self.expanded: dict[int, Tensor] = {}  # copies by place, ``[B, *shape]``, made where the loss needs them
        self.shared: dict[int, SharedParam] = {}  # parameters and transposes, by id
        self.places: dict[int, int] = {}  # of parameters and of copies of vectors, by id
        self._alive: list[Tensor] = []  # whose ids these are
        with temporarily_clear_interpreter_stack():  # under which torch refuses to make leaves
            self.plain = [x.detach().requires_grad_() for x in params]
            self.values = list(map(Tensor.detach, params))  # for layers: a gradient of ``plain`` is of another use
            self.given = list(map(self._give, range(len(self.plain))))

    def get(self, x: object) -> SharedParam | None:
        """Return a shared parameter or its transpose, or None for any other value."""
        return self.shared.get(id(x))

    def place_of(self, x: object) -> int | None:
        """Return the place of a parameter or of its copies, or None for any other value, a transpose among them."""
        return self.places.get(id(x))

    def are_among(self, values: Sequence[object]) -> bool:
        """Return whether there is a shared parameter among values, or in lists among them."""
        if not self.shared.keys().isdisjoint(map(id, values)):
            return True
        return any(not self.shared.keys().isdisjoint(map(id, x)) for x in values if isinstance(x, list | tuple))

    def transpose(self, x: Tensor) -> Tensor:
        """Return the transpose of a shared matrix."""
        param = self.shared[id(x)]
        if x.ndim != 2:
            raise NotLayersError("the loss transposes a parameter that is no matrix")
        return self._keep(SharedParam(x.T, param.place, not param.transposed))

    def copy(self, param: SharedParam) -> Tensor:
        """Return one copy of a shared parameter per sample."""
        with temporarily_clear_interpreter_stack():
            copies = self._expanded(param.place)
        return copies.mT if param.transposed else copies

    def compute(self, func: Callable[..., Tree], leaves: Sequence[object], structure: TreeSpec) -> object:
        """Call a function of parameters alone, whose results are further parameters."""
        args, kwargs = unflatten([self._with_graph(x) for x in leaves], structure)
        with VmapRules(differentiated_by="any"):  # the backward pass will be batched
            results, results_structure = flatten(func(*args, **kwargs))
        # A leaf is no result: the deep copy of a parameter.
        computed = [isinstance(x, Tensor) and x.requires_grad and not x.is_leaf for x in results]
        given = [self._add(x) if yes else x for x, yes in zip(results, computed, strict=True)]
        return unflatten(given, results_structure)

    def _with_graph(self, x: object) -> object:
        """Return the tensor that plain autograd differentiates for an argument of a function."""
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
        """Return where a matrix lies in a parameter, or None if it is no rows and columns of one."""
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
        copies = self._expanded(place)
        self.places[id(copies)] = place
        self._alive.append(copies)
        return copies

    def _expanded(self, place: int) -> Tensor:
        """Return one copy of a parameter per sample, outside of the vmap."""
        if place not in self.expanded:
            value = self.values[place]
            self.expanded[place] = value.expand(self._vmap.size, *value.shape).requires_grad_()
        return add_batch_dim(self.expanded[place], 0, self._vmap.level)

    def _keep(self, param: SharedParam) -> Tensor:
        self.shared[id(param.tensor)] = param
        if not param.transposed:
            self.places[id(param.tensor)] = param.place
        return param.tensor
