"""Merging of graphs that were traced at different sizes into one graph for all sizes."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from persample.utils import trees


def unified(
    graphs: Sequence[GraphModule], points: Sequence[Sequence[int]], places: Sequence[tuple[int, int]]
) -> GraphModule | None:
    """Return the graph for all sizes, or None if the graphs differ in more than integers that depend on the sizes.

    Args:
        graphs: one graph per point.
        points: the sizes of each trace. The corners of a box come first and determine formulas a + bX + cY + dXY; the
            other points check these.
        places: for each size, an (input, axis) that has it.
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
                result.call_function(torch.ops.aten.sym_size.int, (known[0][inputs[place]], axis))
                for place, axis in places
            ]
        if len({(node.op, node.target) for node in row}) > 1:
            return None
        arguments = _merged(row, known, _Formulas(result, sizes, points))
        if arguments is None:
            return None
        new = result.create_node(row[0].op, row[0].target, *arguments, name=row[0].name)
        for node, nodes in zip(row, known, strict=True):
            nodes[node] = new
    return GraphModule(torch.nn.Module(), result)


class _Formulas:
    """Integers that are formulas of the sizes, as nodes of a graph.

    Args:
        graph: the graph that the nodes are added to.
        sizes: the nodes of the sizes.
        points: the sizes at which the integers are known.
    """

    def __init__(self, graph: Graph, sizes: Sequence[Node], points: Sequence[Sequence[int]]) -> None:
        self._graph, self._sizes, self._points = graph, sizes, points
        self._corners = list(itertools.product((0, 1), repeat=len(sizes)))

    def __call__(self, values: Sequence[int]) -> Node | None:
        """Return the node of the integer that has these values at the points, or None if no formula fits."""
        terms = self._terms(values)
        if terms is None:
            return None
        for point, value in zip(self._points, values, strict=True):
            if value != sum(n * prod(x for x, used in zip(point, term, strict=True) if used) for term, n in terms):
                return None
        total: Any = 0
        for term, n in terms:
            added: Any = n
            for size, used in zip(self._sizes, term, strict=True):
                if used:
                    added = size if added == 1 else self._graph.call_function(operator.mul, (added, size))
            total = added if total == 0 else self._graph.call_function(operator.add, (total, added))
        return total

    def _terms(self, values: Sequence[int]) -> list[tuple[tuple[int, ...], int]] | None:
        """Return the nonzero terms of the formula, each as (exponent 0 or 1 of every size, integer coefficient).

        The coefficients are divided differences along each size; the result is None if one is not an integer.
        """
        factors = dict(zip(self._corners, values, strict=False))
        for axis in range(len(self._sizes)):
            low, high = self._points[0][axis], self._points[len(self._corners) - 1][axis]
            for corner in self._corners:
                if corner[axis]:
                    base = (*corner[:axis], 0, *corner[axis + 1 :])
                    factors[corner], rest = divmod(factors[corner] - factors[base], high - low)
                    factors[base] -= factors[corner] * low
                    if rest:
                        return None
        return [(term, n) for term, n in factors.items() if n]


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
