"""In-place writes of a graph: those whose memory nothing else reads are run as ordinary operations."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from persample._torch import OpOverload, aten_unsafe_index_put, aten_unsafe_view, schema
from persample.engines.compiled.kernels import torch_kernel

_aten = torch.ops.aten
_OTHERS = {"index_add_", "scatter_add_", "masked_fill_", "squeeze_"}  # than operations on each number
# Inductor may overwrite the first argument of these with their result, even if its rows share memory (stride 0).
_OVERWRITTEN = {
    *(_aten.index_put.default, aten_unsafe_index_put),
    *(_aten.slice_scatter.default, _aten.select_scatter.default, _aten.diagonal_scatter.default),
}


class Pure(Interpreter):
    """Runs a graph without its simple writes, and as decompositions and Inductor need it.

    ``y.add_(x)`` becomes ``y + x`` where no other tensor that shares the memory of y is read afterwards. Copies into
    inputs that nothing reads afterwards stay. Most traced programs have no other writes. Functionalization removes all
    of them, but traces the program once more.

    Args:
        graph: a flat graph of aten operations.
    """

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        simple = _simple_writes(graph)
        self.needs_functionalization = simple is None
        self._simple = simple or {}

    def run_node(self, n: Node) -> Any:
        """Return the result of a node."""
        args: Any
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target is _aten.view.default:  # results of decompositions may have other strides
            return _aten.reshape.default(*args)
        if kernel := torch_kernel(n.target, args):  # before torch's Python dispatcher decomposes the operation
            return kernel(*args, **kwargs)
        if n not in self._simple:
            return super().run_node(n)
        result = self.env[n.all_input_nodes[0]] = self._simple[n](*args, **kwargs).to(args[0].dtype)
        return result


def copy_overwritten(graph: Graph) -> None:
    """Copy what Inductor may overwrite in a functional, decomposed graph, where rows of it share memory."""
    for node in graph.nodes:
        if node.target in _OVERWRITTEN and 0 in [x for x in node.args[0].meta["val"].stride() if isinstance(x, int)]:
            with graph.inserting_before(node):
                copy = graph.call_function(_aten.clone.default, node.args[:1])
            copy.meta["val"] = node.args[0].meta["val"].clone()
            node.update_arg(0, copy)


def is_write(node: Node) -> bool:
    """Return whether a node writes into one of its arguments.

    Args:
        node: a node of a graph of aten operations.
    """
    return node.op == "call_function" and isinstance(node.target, OpOverload) and schema(node.target).is_mutable


def _simple_writes(graph: GraphModule) -> dict[Node, Any] | None:
    """Return the ordinary operation for each write, or None if a write is not simple."""
    place = {node: number for number, node in enumerate(graph.graph.nodes)}
    # What asks for strides could see that those of an ordinary result are others.
    by_strides = bool(graph.graph.find_nodes(op="call_function", target=_aten.as_strided.default))
    owner: dict[Node, Node] = {}  # of each node's memory
    sharing: dict[Node, list[Node]] = defaultdict(list)
    simple: dict[Node, Any] = {}
    for node in graph.graph.nodes:
        owner[node] = owner[node.all_input_nodes[0]] if _is_view(node) else node
        if is_write(node):
            pure, written = _pure(node), node.all_input_nodes[0]
            alike = sharing[owner[written]]
            read_later = {x for x in alike if any(place[user] > place[node] for user in x.users)}
            if node.target is _aten.copy_.default and written.op == "placeholder" and not {*read_later, *node.users}:
                continue  # a result, such as ``out``: Inductor writes it where it is
            if pure is None or owner[written].op != "call_function" or read_later - {written} or by_strides:
                return None
            simple[node] = pure
            owner[node] = owner[written] = node  # nothing reads the others from here on
            sharing[node].append(written)
        sharing[owner[node]].append(node)
    return simple


def _pure(node: Node) -> Any:
    """Return the operation whose result is what a node writes into its first argument, or None."""
    operation: Any = node.target
    name, _, overload = operation.name().removeprefix("aten::").partition(".")
    if not name.endswith("_") or (torch.Tag.pointwise not in operation.tags and name not in _OTHERS):
        return None
    pure = getattr(getattr(_aten, name[:-1], None), overload or "default", None)
    return pure if pure is not None and _types(pure) == _types(operation) else None


def _types(operation: Any) -> list[str]:
    return [str(argument.real_type) for argument in schema(operation).arguments]


def _is_view(node: Node) -> bool:
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    return node.target is aten_unsafe_view or any(x.alias_info is not None for x in schema(node.target).returns)
