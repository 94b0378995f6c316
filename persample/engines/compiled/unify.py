"""Merging of graphs that were traced at two batch sizes into one graph for all of them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from persample._torch import cond, scan
from persample.utils import trees


class UnlikeError(Exception):
    """Raised for graphs that differ in more than integers of the form a + b · size."""


def unified(
    one: GraphModule, other: GraphModule, sizes: tuple[int, int], axis: tuple[int, int] | None = None
) -> GraphModule:
    """Return the graph for all sizes.

    Args:
        one: the graph at the first size.
        other: the graph at the second size.
        sizes: the sizes.
        axis: the (input, axis) that has the size; without one, the size becomes the last input of the graph.

    Raises:
        UnlikeError: if no single graph serves all sizes.
    """
    if len(one.graph.nodes) != len(other.graph.nodes):
        raise UnlikeError
    result, root, made, of_other = Graph(), torch.nn.Module(), dict[Node, Node](), dict[Node, Node]()
    inputs = one.graph.find_nodes(op="placeholder")
    size: Node | None = None

    def merged(value: Any, second: Any) -> Any:
        if isinstance(value, Node) and made[value] is of_other.get(second):
            return made[value]
        if type(value) is type(second) and value == second:
            return value
        if type(value) is int is type(second):
            return _formula(result, size, sizes, (value, second))
        raise UnlikeError

    for node, second in zip(one.graph.nodes, other.graph.nodes, strict=True):
        if (node.op, node.target) != (second.op, second.target):
            raise UnlikeError
        if node.op != "placeholder" and size is None:
            size = result.placeholder("size") if axis is None else _size(result, made[inputs[axis[0]]], axis[1])
        if node.op == "get_attr":  # the body of a loop, or a branch
            name = str(node.target)
            root.add_module(name, unified(getattr(one, name), getattr(other, name), sizes))
        (leaves, structure), (others, alike) = (trees.flatten((list(x.args), dict(x.kwargs))) for x in (node, second))
        if structure != alike:
            raise UnlikeError
        args, kwargs = trees.unflatten(list(map(merged, leaves, others)), structure)
        if node.target in (scan, cond):
            args = (*args[:-1], (*args[-1], size))
        new = result.create_node(node.op, node.target, tuple(args), kwargs, name=node.name)
        made[node] = of_other[second] = new
    return GraphModule(root, result)


def _size(graph: Graph, tensor: Node, axis: int) -> Node:
    return graph.call_function(torch.ops.aten.sym_size.int, (tensor, axis))


def _formula(graph: Graph, size: Node | None, sizes: tuple[int, int], values: tuple[int, int]) -> Any:
    """Return the node of the integer a + b · size that has these values at the sizes.

    Raises:
        UnlikeError: if it is another function of the size: b is a fraction, or a is negative and large. Of a polynomial
            of a higher degree it is, at most minus the product of the sizes.
    """
    step, rest = divmod(values[1] - values[0], sizes[1] - sizes[0])
    first = values[0] - step * sizes[0]
    if rest or first < -sizes[0] * sizes[1] // 2:
        raise UnlikeError
    product: Any = size if step == 1 else graph.call_function(operator.mul, (size, step))
    return graph.call_function(operator.add, (product, first)) if first else product
