"""What a loss keeps outside, such as a count of its calls: Dynamo stores there what the graph returns for it.

Numbers of Python must be computed apart, because torch.func takes none. So must tensors that depend on no argument
(NumPy's numbers are such): what stands for a result of the graph would be stored, and read by the next call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from persample._torch import SETS_MODE, is_number_input, source_of
from persample.engines.compiled.batchable import memory_of, written_memory
from persample.utils.trees import Tree

_SIZE = re.compile(r"\.(size\(\)\[\d+\]|stride\(\)\[\d+\]|storage_offset\(\))$")  # they tell calls of one graph apart
CHANGES_A_NUMBER = "the function changes a number that its result depends on"


class Split(NamedTuple):
    """A graph of Dynamo without its numbers."""

    graph: GraphModule  # the graph that is left, from tensors to tensors
    used: list[int]  # the places of its inputs among those of the whole graph
    # for each tensor among the outputs of the whole graph, its place among those of the graph that is left
    outputs: dict[int, int]
    kept: list[int]  # the outputs of the whole graph that ``compute`` returns
    compute: Callable[..., list[object]]  # from the inputs of the whole graph to the outputs that need no argument


def split_kept(module: GraphModule) -> Split | None:
    """Take out of a graph the numbers, and what only they depend on; and tell which outputs depend on no argument.

    The graph is not changed: Dynamo reads it again. None if there are no such numbers and outputs.

    Raises:
        RuntimeError: if a tensor depends on a number that the function changes: it would be another at every call.
    """
    nodes, numbers = list(module.graph.nodes), _numbers(module.graph)
    results: Tree = module.graph.output_node().args[0]
    inputs = [x for x in nodes if x.op == "placeholder"]
    of_tensors = _ancestors([x for x in nodes if x not in numbers])
    dropped = numbers - of_tensors - {x for x in inputs if _SIZE.search(source_of(x) or "")}
    of_no_argument = _of_no_argument(module.graph)
    kept = [place for place, x in enumerate(results) if x in numbers or x in of_no_argument]
    if not dropped and not kept:
        return None
    if _ancestors([x for x in results if x in numbers]) & of_tensors:
        raise RuntimeError(CHANGES_A_NUMBER)
    sets_mode = [x for x in nodes if getattr(x.target, "__name__", "") in SETS_MODE]
    of_kept = _ancestors([*sets_mode, *(results[place] for place in kept)])
    tensors = [place for place, x in enumerate(results) if x not in numbers]
    return Split(
        _part(module, [x for x in nodes if x not in dropped], [results[place] for place in tensors]),
        [place for place, x in enumerate(inputs) if x not in dropped],
        {place: n for n, place in enumerate(tensors)},
        kept,
        _part(module, of_kept.union(inputs), [results[place] for place in kept]),
    )


def _numbers(graph: Graph) -> set[Node]:
    """Return the nodes that depend on numbers only; Dynamo passes a float as a tensor, and returns it as one."""

    def is_value(node: Node) -> bool:
        is_number = not isinstance(node.meta.get("example_value"), Tensor) or node.target is torch.scalar_tensor
        return is_number and bool(node.all_input_nodes)

    return _made_of(graph, is_number_input, is_value)


def _of_no_argument(graph: Graph) -> set[Node]:
    """Return the nodes that depend on what the function reads elsewhere, and on no argument, transform or write."""
    written = written_memory(graph)

    def is_read(node: Node) -> bool:
        return memory_of(node) not in written and "L['args']" not in (source_of(node) or "L['args']")

    def is_value(node: Node) -> bool:
        uses_level = "functorch" in str(getattr(node.target, "__module__", ""))  # which another node opens
        return memory_of(node) not in written and not uses_level

    return _made_of(graph, is_read, is_value)


def _made_of(graph: Graph, begins: Callable[[Node], bool], goes_on: Callable[[Node], bool]) -> set[Node]:
    """Return the inputs that ``begins`` admits, and the operations, admitted by ``goes_on``, that take no others."""
    known = set[Node]()
    for node in graph.nodes:
        if begins(node) if node.op == "placeholder" else known.issuperset(node.all_input_nodes) and goes_on(node):
            known.add(node)
    return known - {graph.output_node()}


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
