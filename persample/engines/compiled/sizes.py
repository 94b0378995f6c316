"""One graph for many sizes: traced at a few, with every number that depends on them found by comparing the graphs.

Torch's own symbolic shapes are frozen by most batching rules of torch.func; two traces at different sizes are not.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from persample import trees
from persample.engines.compiled.trace import Format

# Primes, so that no other size is likely to be a multiple; as many pairs as sizes may vary independently.
_SIZES = ((1009, 1013, 1019), (1511, 1523, 1531))


@dataclass(frozen=True)
class Varying:
    """Which sizes of which inputs vary, those that vary alike as one.

    Args:
        symbols: for each independent size the places (input, axis) where it stands.
    """

    symbols: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def between(cls, one: Sequence[Format], other: Sequence[Format]) -> Varying | None:
        """Return what varies between two calls, or None if that is too much, or nothing.

        Args:
            one: the formats of the inputs of one call.
            other: those of another.
        """
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            if not (_is_contiguous(a) and _is_contiguous(b)) and (a.shape, a.stride) != (b.shape, b.stride):
                return None
            for axis, sizes in enumerate(zip(a.shape, b.shape, strict=True)):
                if sizes[0] != sizes[1]:
                    groups.setdefault(sizes, []).append((place, axis))
        return cls(tuple(map(tuple, groups.values()))) if 0 < len(groups) <= len(_SIZES) else None

    def of(self, formats: Sequence[Format]) -> tuple[int, ...] | None:
        """Return the sizes in a call, or None if those that should be alike are not.

        Args:
            formats: of its inputs.
        """
        found = [{formats[place].shape[axis] for place, axis in places} for places in self.symbols]
        return tuple(sizes.pop() for sizes in found) if all(len(sizes) == 1 for sizes in found) else None

    def fixed(self, formats: Sequence[Format]) -> list[tuple[Any, ...]]:
        """Return what must be equal in all calls.

        Args:
            formats: of the inputs of a call.
        """
        return self.forms(formats, [-1] * len(self.symbols))

    def forms(self, formats: Sequence[Format], sizes: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return shape and strides of the inputs at other sizes.

        Args:
            formats: of the inputs of a call.
            sizes: one for each independent size.
        """
        shapes = [list(f.shape) for f in formats]
        for size, places in zip(sizes, self.symbols, strict=True):
            for place, axis in places:
                shapes[place][axis] = size
        moved = {place for places in self.symbols for place, _ in places}
        strides = [contiguous(shape) if n in moved else f.stride for n, (f, shape) in enumerate(zip(formats, shapes))]  # noqa: B905
        return list(zip(map(tuple, shapes), strides, strict=True))

    def points(self) -> list[tuple[int, ...]]:
        """Return at which sizes to trace: the corners that a formula is found from, and one more to check it."""
        used = _SIZES[: len(self.symbols)]
        return [*itertools.product(*(sizes[:2] for sizes in used)), tuple(sizes[2] for sizes in used)]


def contiguous(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Return the strides of a contiguous tensor.

    Args:
        shape: its shape.
    """
    strides: list[Any] = []
    for size in reversed(shape):
        strides.insert(0, strides[0] * last if strides else 1)
        last = size
    return tuple(strides)


def unified(graphs: Sequence[GraphModule], varying: Varying) -> GraphModule | None:
    """Return the graph for all sizes, or None if the graphs differ in more than numbers that follow from the sizes.

    Args:
        graphs: traced at ``varying.points()``.
        varying: what varies.
    """
    rows = list(zip(*(graph.graph.nodes for graph in graphs), strict=False))
    if len({len(graph.graph.nodes) for graph in graphs}) > 1:
        return None
    result, known = Graph(), [dict[Node, Node]() for _ in graphs]
    inputs = [node for node in graphs[0].graph.nodes if node.op == "placeholder"]
    sizes: list[Node] = []
    for row in rows:
        if row[0].op != "placeholder" and not sizes:
            sizes = [
                result.call_function(torch.ops.aten.sym_size.int, (known[0][inputs[places[0][0]]], places[0][1]))
                for places in varying.symbols
            ]
        if len({(node.op, node.target) for node in row}) > 1:
            return None
        arguments = _merged(row, known, _Formulas(result, sizes))
        if arguments is None:
            return None
        new = result.create_node(row[0].op, row[0].target, *arguments, name=row[0].name)
        for node, nodes in zip(row, known, strict=True):
            nodes[node] = new
    return GraphModule(torch.nn.Module(), result)


class _Formulas:
    """Numbers that follow from the sizes, as nodes of a graph.

    Args:
        graph: where to.
        sizes: the nodes of the sizes.
    """

    def __init__(self, graph: Graph, sizes: Sequence[Node]) -> None:
        self._graph, self._sizes = graph, sizes

    def __call__(self, values: Sequence[int]) -> Node | None:
        """Return the node of the number that has these values at the points, or None if no simple formula fits."""
        used = _SIZES[: len(self._sizes)]
        *corners, check = values
        table = dict(zip(itertools.product((0, 1), repeat=len(used)), corners, strict=True))
        # a + bX + cY + dXY: successive differences along each size.
        coefficients = dict(table)
        for axis, (low, high, _) in enumerate(used):
            for corner in [corner for corner in table if corner[axis] == 0]:
                upper = (*corner[:axis], 1, *corner[axis + 1 :])
                slope, rest = divmod(coefficients[upper] - coefficients[corner], high - low)
                if rest:
                    return None
                coefficients[upper] = slope
                coefficients[corner] -= slope * low
        terms = {corner: n for corner, n in coefficients.items() if n}
        third = [sizes[2] for sizes in used]
        if check != sum(n * _product(third, corner) for corner, n in terms.items()):
            return None
        total: Any = 0
        for corner, n in terms.items():
            term: Any = n
            for size, present in zip(self._sizes, corner, strict=True):
                if present:
                    term = size if term == 1 else self._graph.call_function(operator.mul, (term, size))
            total = term if total == 0 else self._graph.call_function(operator.add, (total, term))
        return total


def _product(sizes: Sequence[int], present: Sequence[int]) -> int:
    result = 1
    for size, here in zip(sizes, present, strict=True):
        result *= size if here else 1
    return result


def _merged(row: Sequence[Node], known: Sequence[dict[Node, Node]], formula: _Formulas) -> tuple[Any, Any] | None:
    flat = [trees.flatten((list(node.args), dict(node.kwargs))) for node in row]
    if any(structure != flat[0][1] for _, structure in flat):
        return None
    merged: list[Any] = []
    for values in zip(*(leaves for leaves, _ in flat), strict=True):
        if isinstance(values[0], Node):
            nodes = {nodes.get(value) for value, nodes in zip(values, known, strict=True)}
            if len(nodes) > 1:
                return None
            merged.append(nodes.pop())
        elif all(type(x) is type(values[0]) and x == values[0] for x in values):
            merged.append(values[0])
        elif all(type(x) is int for x in values):
            node = formula(values)
            if node is None:
                return None
            merged.append(node)
        else:
            return None
    args, kwargs = trees.unflatten(merged, flat[0][1])
    return tuple(args), kwargs


def _is_contiguous(f: Format) -> bool:
    wanted = contiguous(f.shape)
    return all(size == 1 or a == b for size, a, b in zip(f.shape, f.stride, wanted, strict=True)) or 0 in f.shape
