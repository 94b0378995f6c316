"""Traced graphs as straight-line Python, which runs operation by operation, without a compiler.

What only tracing needed is dropped: detachments, views that cancel. The rest is the code that ``torch.fx`` writes: one
line per operation, in which a tensor is deleted after its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from persample._torch import OpOverload, aten_unsafe_view, schema
from persample.engines.compiled.bounds import reads_an_index
from persample.utils.tracing import Opaque

_aten = torch.ops.aten
Run = Callable[[list[Tensor]], Sequence[Tensor]]
_SAME = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}
# The result has the elements of the first argument in the same order.
_RESHAPES = {
    *(_aten.view.default, aten_unsafe_view, _aten.unsqueeze.default),
    *(_aten.squeeze.dim, _aten.squeeze.dims, _aten.squeeze.default),
}
_VIEWS = {*_RESHAPES, _aten.t.default, _aten.transpose.int, _aten.expand.default, _aten.permute.default}
# Torch's own functions take half the time that their operations take when called as objects.
_FUNCTIONS: dict[object, Callable[..., object]] = {
    getattr(getattr(_aten, name), overload): getattr(Tensor if name.endswith("_") or name == "view" else torch, name)
    for overload, names in {
        "Scalar": "ge gt le lt masked_fill mul rsub",
        "Tensor": "add add_ div div_ le lt mul mul_ sub",
        "Tensor_Scalar": "pow",
        "default": "addcmul addmm baddbmm bmm cat clone exp gather mm neg permute relu sigmoid split_with_sizes sqrt "
        "stack t tanh unsqueeze view",
        "dim": "squeeze",
        "dim_IntList": "sum",
        "dims": "squeeze",
        "int": "select transpose unbind",
        "self": "where",
    }.items()
    for name in names.split()
} | {_aten.expand.default: Tensor.expand, _aten.lerp.Tensor: torch.lerp, _aten.sym_size.int: Tensor.size}


def simplify(module: GraphModule) -> None:
    """Drop views of a graph that change nothing, and operations whose results are not used."""
    graph = module.graph
    if any(torch.Tag.inplace_view in getattr(node.target, "tags", ()) for node in graph.nodes):
        return  # a view may change its shape later
    views: dict[str, Node] = {}
    for node in graph.nodes:
        if (same := _same(node, views)) is not node:
            node.replace_all_uses_with(same)
        elif node.target in _RESHAPES and node.all_input_nodes[0].target in _RESHAPES:
            shape = node.args[1] if node.target is _aten.view.default else list(node.meta["val"].shape)
            node.target, node.args, node.kwargs = _aten.view.default, (_root(node), shape), {}
    # A node is needed that draws random numbers, writes, or whose kernel may reject an index.
    graph.eliminate_dead_code(lambda node: node.is_impure() or reads_an_index(node.target))
    module.recompile()


def straight(module: GraphModule) -> Run:
    """Return a graph as straight-line Python, from the list of the inputs to the outputs."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = Opaque.functions.get(node.target) or _FUNCTIONS.get(node.target, node.target)
    run = GraphModule(module, graph).forward
    return lambda inputs: run(*inputs)


def writes(node: Node) -> bool:
    """Return whether a node writes into one of its arguments."""
    return isinstance(node.target, OpOverload) and schema(node.target).is_mutable


def _root(node: Node) -> Node:
    """Return the tensor whose elements a node has in the same order."""
    while node.target in _RESHAPES:
        node = node.all_input_nodes[0]
    return node


def _same(node: Node, views: dict[str, Node]) -> Node:
    """Return the earliest node of the same memory, seen in the same shape; ``views`` are those that came before."""
    if node.target in _SAME:
        return node.all_input_nodes[0]
    if node.target not in _VIEWS:
        return node
    root = _root(node) if node.target in _RESHAPES else node.all_input_nodes[0]
    return root if _form(root) == _form(node) else views.setdefault(f"{node.target}{node.args}", node)


def _form(node: Node) -> tuple[object, ...]:
    """Return the shape, the strides of axes longer than 1, and the dtype of the tensor that a node computes."""
    value: Tensor = node.meta["val"]
    steps = tuple(stride if size != 1 else 1 for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.shape, steps, value.dtype
