"""Traced graphs as straight-line Python, which runs operation by operation, without a compiler.

What only tracing needed is dropped: detachments, views of views, products with ones. The rest is one function with one
line per operation, in which a tensor is deleted after its last use.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.nn import functional as F

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
# Views by their kernels, not by their schemas.
_VIEWS_WITHOUT_A_WORD = {
    *(aten_unsafe_view, _aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default, _aten.lift.default),
}
_SWAPS = {_aten.t.default, _aten.transpose.int}
_VIEWS = {*_RESHAPES, *_SWAPS, _aten.expand.default, _aten.permute.default}
_PRODUCTS = {_aten.addmm.default, _aten.mm.default}
_IN_PLACE = {
    _aten.add.Tensor: _aten.add_.Tensor,
    _aten.div.Tensor: _aten.div_.Tensor,
    _aten.exp.default: _aten.exp_.default,
    _aten.masked_fill.Scalar: _aten.masked_fill_.Scalar,
    _aten.mul.Scalar: _aten.mul_.Scalar,
    _aten.mul.Tensor: _aten.mul_.Tensor,
    _aten.neg.default: _aten.neg_.default,
    _aten.relu.default: _aten.relu_.default,
    _aten.sigmoid.default: _aten.sigmoid_.default,
    _aten.sqrt.default: _aten.sqrt_.default,
    _aten.sub.Tensor: _aten.sub_.Tensor,
    _aten.tanh.default: _aten.tanh_.default,
}
_ONES = {_aten.ones_like.default, _aten.ones.default, _aten.new_ones.default}
# Torch's own functions take half the time that their operations take when called as objects.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    getattr(getattr(_aten, name), overload): getattr(Tensor if name.endswith("_") or name == "view" else torch, name)
    for overload, names in {
        "Scalar": "ge gt le lt masked_fill_",
        "Tensor": "add add_ div div_ le lt mul mul_ sub sub_",
        "default": "addcmul addmm baddbmm bmm cat exp exp_ gather mm neg neg_ permute relu relu_ sigmoid sigmoid_ "
        "split_with_sizes sqrt sqrt_ stack t tanh tanh_ unsqueeze view",
        "dim": "squeeze",
        "dim_IntList": "sum",
        "dims": "squeeze",
        "int": "select transpose",
        "self": "where",
    }.items()
    for name in names.split()
} | {_aten.expand.default: Tensor.expand, _aten.lerp.Tensor: torch.lerp, _aten.sym_size.int: Tensor.size}


def simplify(module: GraphModule) -> None:
    """Drop operations of a graph that change nothing, and those whose results are not used."""
    graph = module.graph
    if any(torch.Tag.inplace_view in getattr(node.target, "tags", ()) for node in graph.nodes):
        return  # a view may change its shape later
    changed = {owner(x) for node in graph.nodes for x in written(node)}
    views: dict[str, Node] = {}
    for node in graph.nodes:
        if node not in changed:
            _before_reshapes(node)
        args: Any = node.args
        if node.target in _VIEWS and (known := views.setdefault(f"{node.target}{args}", node)) is not node:
            node.replace_all_uses_with(known)
        elif (same := _same(node, args, changed)) is not None:
            node.replace_all_uses_with(same)
        elif node.target in _RESHAPES and args[0].target in _RESHAPES:
            shape = args[1] if node.target is _aten.view.default else list(node.meta["val"].shape)
            node.target, node.args, node.kwargs = _aten.view.default, (_root(node), shape), {}
        elif node.target in _PRODUCTS and not node.kwargs and args[-1].target is _aten.t.default:
            *bias, x, weight = args
            node.target, node.args = F.linear, (x, weight.args[0], *bias)
    graph.eliminate_dead_code(_is_needed)
    last_reads = {owner(x): node for node in graph.nodes for x in node.all_input_nodes}
    for node in graph.nodes:
        if node.target in _IN_PLACE and (own := _memory_for(node, last_reads)) is not None:
            node.target = _IN_PLACE[node.target]
            last_reads[own] = last_reads.get(node, node)
    module.recompile()


def _before_reshapes(node: Node) -> None:
    """Let an elementwise operation on tensors that were reshaped alike read these as they were; reshape its result."""
    result: Any = node.meta.get("val")
    target: Any = node.target
    operands = [x for x in node.all_input_nodes if _shape(x) != ()]
    shapes = {_shape(_root(x)) for x in operands}
    if torch.Tag.pointwise not in getattr(target, "tags", ()) or len(shapes) != 1 or writes(node):
        return
    (shape,) = shapes
    # Tensors of one element and no axis are promoted otherwise; a memory format is that of some number of axes.
    is_alike = shape and shape != _shape(node) and all(_shape(x) == _shape(node) for x in operands)
    if not is_alike or "memory_format" in node.kwargs:
        return
    if all(x.meta["val"].is_contiguous() for x in (node, *map(_root, operands))):
        with node.graph.inserting_before(node):
            before = node.graph.call_function(
                target, map_arg(node.args, lambda x: _root(x) if x in operands else x), node.kwargs
            )
        before.meta["val"] = result.view(shape)
        node.target, node.args, node.kwargs = _aten.view.default, (before, list(result.shape)), {}


def _is_needed(node: Node) -> bool:
    """Return whether a node has an effect: it draws random numbers, writes, or its kernel may reject an index."""
    return node.is_impure() or reads_an_index(node.target)


def straight(module: GraphModule) -> Run:
    """Return a graph as straight-line Python: from the list of the inputs, which it empties, to the outputs."""
    graph = module.graph
    last_use = {x: node for node in graph.nodes for x in node.all_input_nodes}
    bound: dict[str, Any] = {}
    inputs = [str(node) for node in graph.find_nodes(op="placeholder")]
    lines = [f"def run(inputs):\n    {''.join(f'{name}, ' for name in inputs)} = inputs\n    inputs.clear()"]

    def said(x: Any) -> str:
        if isinstance(x, Node):
            return str(x)
        if isinstance(x, list | tuple):
            text = "".join(f"{said(item)}, " for item in x)
            return f"[{text}]" if isinstance(x, list) else f"({text})"
        if x is None or type(x) in (bool, int, str):
            return repr(x)
        if isinstance(x, slice):
            return f"slice({said(x.start)}, {said(x.stop)}, {said(x.step)})"
        return _bind(x)

    def _bind(x: Any) -> str:
        name = f"_{len(bound)}"
        bound[name] = x
        return name

    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"    return {said(list(node.args[0]))}")
        elif node.op == "get_attr":
            lines.append(f"    {node} = {_bind(getattr(module, str(node.target)))}")
        elif node.op == "call_function":
            args = [*map(said, node.args), *(f"{name}={said(x)}" for name, x in node.kwargs.items())]
            function = _bind(Opaque.functions.get(node.target) or _FUNCTIONS.get(node.target, node.target))
            lines.append(f"    {node} = {function}({', '.join(args)})")
        dead = [str(x) for x in (node, *node.all_input_nodes) if x.op != "output" and last_use.get(x, x) is node]
        if dead and node.op != "placeholder":
            lines.append(f"    del {', '.join(dict.fromkeys(dead))}")
    exec(compile("\n".join(lines), "<persample>", "exec"), bound)
    return bound["run"]


def writes(node: Node) -> bool:
    """Return whether a node writes into one of its arguments."""
    return isinstance(node.target, OpOverload) and schema(node.target).is_mutable


def owner(node: Node) -> Node:
    """Return the node whose memory a node's result is."""
    while (given := _aliased(node)) is not None:
        node = given
    return node


def written(node: Node) -> list[Node]:
    """Return the arguments that a node writes into."""
    if not isinstance(node.target, OpOverload):
        return []
    return [x for said, x in _arguments(node) if said.alias_info is not None and said.alias_info.is_write]


def returns_memory(node: Node) -> bool:
    """Return whether the result of a node may share memory with one of its arguments."""
    return isinstance(node.target, OpOverload) and any(x.alias_info is not None for x in schema(node.target).returns)


def _aliased(node: Node) -> Node | None:
    """Return the argument whose memory a node's result is, if there is one."""
    if node.target is operator.getitem or node.target in _VIEWS_WITHOUT_A_WORD:
        return next(iter(node.all_input_nodes), None)
    if not returns_memory(node):
        return None
    sets = [x.alias_info.before_set for x in schema(node.target).returns if x.alias_info is not None]
    own = (x for said, x in _arguments(node) if said.alias_info and said.alias_info.before_set in sets)
    return next(own, None)


def _arguments(node: Node) -> Iterator[tuple[Any, Node]]:
    """Yield the nodes among the arguments of an operation, each with the argument of its schema."""
    for place, said in enumerate(schema(node.target).arguments):
        given = node.args[place] if place < len(node.args) else node.kwargs.get(said.name)
        yield from ((said, x) for x in (given if isinstance(given, list | tuple) else [given]) if isinstance(x, Node))


def _root(node: Node) -> Node:
    """Return the tensor whose elements a node has in the same order."""
    while node.target in _RESHAPES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _same(node: Node, args: Any, changed: set[Node]) -> Any:
    """Return an earlier node with the same elements in the same shape, or None if there is none."""
    if node.target in _SAME:
        return args[0]
    if node.target in _VIEWS:
        root = _root(node) if node.target in _RESHAPES else args[0]
        if _form(root) == _form(node):
            return root
        swaps_again = node.target in _SWAPS and root.target is node.target and set(root.args[1:]) == set(args[1:])
        return root.args[0] if swaps_again and _form(root.args[0]) == _form(node) else None
    if node.target not in {_aten.pow.Tensor_Scalar, _aten.mul.Tensor} or not changed.isdisjoint(
        map(owner, (node, *node.all_input_nodes))
    ):
        return None
    pairs = (args, args[::-1])
    return next((x for x, one in pairs if _is_one(one) and _form(x) == _form(node)), None)


def _is_one(x: Any) -> bool:
    while isinstance(x, Node) and x.target in {*_RESHAPES, _aten.expand.default}:
        x = x.args[0]
    return x.target in _ONES if isinstance(x, Node) else x == 1


def _shape(node: Node) -> Any:
    """Return the shape of the tensor that a node computes; None for anything else."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _form(x: Any) -> Any:
    """Return the shape, the strides of axes longer than 1, and the dtype of a node's value."""
    value = x.meta.get("val") if isinstance(x, Node) else None
    if not isinstance(value, Tensor):
        return None
    steps = tuple(stride if size != 1 else 1 for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.shape, steps, value.dtype


def _memory_for(node: Node, last_reads: dict[Node, Node]) -> Node | None:
    """Return the owner of the memory of a node's first argument, if nothing reads it later and the result fits in."""
    first: Any = node.args[0]
    if not isinstance(first, Node) or _form(first) is None or _form(first) != _form(node):
        return None
    own = owner(first)
    is_own = own.op == "call_function" and own.target not in Opaque.functions and first.target is not operator.getitem
    # x + x.T would read what it has written.
    is_read_once = all(x is first or owner(x) is not own for x in node.all_input_nodes)
    return own if is_own and is_read_once and last_reads[own] is node else None
