"""Merging of graphs that were traced at different batch sizes into one graph for all of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from persample._torch import cond, scan
from persample.utils import trees


def unified(
    graphs: Sequence[GraphModule], sizes: Sequence[int], axis: tuple[int, int] | None = None
) -> GraphModule | None:
    """Return the graph for all sizes, or None if the graphs differ in more than integers of the form a + b · size.

    Args:
        graphs: one graph per size.
        sizes: the sizes, at least three.
        axis: the (input, axis) that has the size; without one, the size becomes the last input of the graph.
    """
    rows = list(zip(*(graph.graph.nodes for graph in graphs), strict=False))
    if len({len(graph.graph.nodes) for graph in graphs}) > 1:
        return None
    result, root, known = Graph(), torch.nn.Module(), [dict[Node, Node]() for _ in graphs]
    inputs = [node for node in graphs[0].graph.nodes if node.op == "placeholder"]
    size: Node | None = None
    for row in rows:
        first = row[0]
        if first.op != "placeholder" and size is None:
            size = result.placeholder("size") if axis is None else _size(result, known[0][inputs[axis[0]]], axis[1])
        if len({(node.op, node.target) for node in row}) > 1:
            return None
        if first.op == "get_attr":  # the body of a loop, or a branch
            body = unified([getattr(graph, str(first.target)) for graph in graphs], sizes)
            if body is None:
                return None
            root.add_module(str(first.target), body)
        arguments = _merged(row, known, _Formulas(result, size, sizes))
        if arguments is None:
            return None
        if first.target in (scan, cond):
            (*rest, given), _ = arguments
            arguments = (*rest, (*given, size)), {}
        new = result.create_node(first.op, first.target, arguments[0], arguments[1], name=first.name)
        for node, nodes in zip(row, known, strict=True):
            nodes[node] = new
    return GraphModule(root, result)


def _size(graph: Graph, tensor: Node, axis: int) -> Node:
    return graph.call_function(torch.ops.aten.sym_size.int, (tensor, axis))


class _Formulas:
    """Integers that are formulas of the size, as nodes of a graph.

    Args:
        graph: the graph that the nodes are added to.
        size: the node of the size.
        sizes: the sizes at which the integers are known.
    """

    def __init__(self, graph: Graph, size: Node | None, sizes: Sequence[int]) -> None:
        self._graph, self._size, self._sizes = graph, size, sizes

    def __call__(self, values: Sequence[int]) -> Node | None:
        """Return the node of the integer that has these values at the sizes, or None if no formula fits."""
        step, rest = divmod(values[1] - values[0], self._sizes[1] - self._sizes[0])
        first = values[0] - step * self._sizes[0]
        if rest or any(value != first + step * size for value, size in zip(values, self._sizes, strict=True)):
            return None
        product = self._size if step == 1 else self._graph.call_function(operator.mul, (self._size, step))
        return self._graph.call_function(operator.add, (product, first)) if first else product


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
