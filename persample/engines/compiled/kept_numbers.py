"""Numbers that a loss keeps outside, such as a count of its calls: Dynamo stores what the graph returns for them.

They depend on other numbers only, which Dynamo makes inputs of the graph once they have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from persample._torch import is_number_input


def split_numbers(module: GraphModule) -> tuple[GraphModule, Callable[..., tuple[list[Any], list[Any]]] | None]:
    """Take the numbers out of the outputs of a graph, and what only they depend on out of the graph.

    Args:
        module: a graph of Dynamo, which reads it again and must find it unchanged.

    Returns:
        The graph that is left, and a function from the inputs of the former to those of the latter and to the former
        outputs: numbers, and None in the place of each tensor. If there are no numbers, the same graph and None.

    Raises:
        RuntimeError: if a tensor depends on a number that the function changes: it would be another at every call.
    """
    nodes, numbers = list(module.graph.nodes), _numbers(module.graph)
    results: Any = module.graph.output_node().args[0]
    is_number = [x in numbers for x in results]
    kept = [x for x in results if x in numbers]
    if not kept:
        return module, None
    of_numbers = _ancestors(kept)
    of_tensors = _ancestors([x for x in nodes if x not in numbers])
    if of_numbers & of_tensors:
        raise RuntimeError("the function changes a number that its result depends on")
    inputs = [x for x in nodes if x.op == "placeholder"]
    computed = _part(module, of_numbers.union(inputs), kept)
    used = [place for place, x in enumerate(inputs) if x not in of_numbers]
    left = _part(module, [x for x in nodes if x not in of_numbers], [x for x in results if x not in numbers])

    def split(*inputs: Any) -> tuple[list[Any], list[Any]]:
        values = iter(computed(*inputs))
        return [inputs[place] for place in used], [next(values) if number else None for number in is_number]

    return left, split


def _numbers(graph: Graph) -> set[Node]:
    """Return the nodes that depend on numbers only; Dynamo passes a float as a tensor, and returns it as one."""
    known = set[Node]()
    for node in graph.nodes:
        if node.op == "placeholder":
            is_number = is_number_input(node)
        else:
            is_value = not isinstance(node.meta.get("example_value"), Tensor) or node.target is torch.scalar_tensor
            is_number = node.op != "output" and is_value and bool(node.args) and known.issuperset(node.all_input_nodes)
        if is_number:
            known.add(node)
    return known


def _ancestors(nodes: Sequence[Node]) -> set[Node]:
    found, todo = set[Node](), [x for x in nodes if x.op != "output"]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _part(module: GraphModule, nodes: Collection[Node], results: list[Node]) -> GraphModule:
    graph, made = Graph(), dict[Node, Node]()
    for node in module.graph.nodes:
        if node in nodes and node.op != "output":
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output([made[x] for x in results])
    return GraphModule(module, graph)
