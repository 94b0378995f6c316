"""Graphs of Dynamo, rewritten so that torch.func can batch and differentiate them.

Dynamo records what torch.compile supports, and torch.func lacks some of it: activation checkpoints, old-style
``autograd.Function``s, ``.item()``, writes of per-sample values into a tensor that the loss made for all samples. It
also records the levels of inner transforms as constants, though these lie above our own levels here.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.fx import Graph, GraphModule, Node

from persample._torch import (
    CLOSES_LEVEL,
    GET_DATA,
    LEVEL_ARGUMENT,
    OPENS_LEVEL,
    storage_id,
)
from persample.utils.tracing import is_wrapped
from persample.utils.trees import Leaf, Tree
from persample.vmap_rules.effects import of_each
from persample.vmap_rules.indexing import getitem, setitem

_WRITES = {
    *(operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv),
    *(operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor, setitem),
}
UNREAD = {getitem: operator.getitem, setitem: operator.setitem}
_CHANGES_SHAPE = {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"}  # torch refuses all others


def make_batchable(module: GraphModule) -> None:
    """Rewrite a graph, and those that it calls, in place. After an interrupt, a second call completes the first."""
    for part in module.modules():
        if isinstance(part, GraphModule):
            _shift_levels(part.graph)
            _inline(part.graph)
            _keep_values(part.graph)
            _give_each_sample_its_own(part.graph)
            part.recompile()


def _give_each_sample_its_own(graph: Graph) -> None:
    """Copy for each sample what the loss made for all of them and writes into: vmap refuses the write otherwise."""
    inputs, written = graph.find_nodes(op="placeholder"), written_memory(graph)
    for node in list(graph.nodes):
        memory = memory_of(node)
        if memory not in written:
            continue
        written.remove(memory)
        if node.op != "placeholder":
            with graph.inserting_after(node):
                own = graph.call_function(of_each, (node, *inputs))
            node.replace_all_uses_with(own, delete_user_cb=lambda user, own=own: user is not own)


def written_memory(graph: Graph) -> set[int]:
    """Return the memory that a graph writes into, by ``memory_of``."""
    memory = (memory_of(node.args[0]) for node in graph.nodes if writes(node))
    return {x for x in memory if x is not None}


def memory_of(node: object) -> int | None:
    """Return what identifies the memory of a tensor in a graph of Dynamo; None of anything else.

    None also of a tensor of an inner transform, whose example has no memory.
    """
    example = node.meta.get("example_value") if isinstance(node, Node) else None
    if not isinstance(example, Tensor) or is_wrapped(example):
        return None
    return storage_id(example.untyped_storage())


def name_of(node: Node) -> str:
    """Return the name of the function or method that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def writes(node: Node) -> bool:
    """Return whether a node of a graph of Dynamo writes into a tensor."""
    if node.op not in {"call_function", "call_method"}:
        return False
    name = name_of(node)
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or node.target in _WRITES or node.kwargs.get("inplace") is True


def _nodes(module: GraphModule) -> Iterator[Node]:
    """Yield the nodes of a graph and of those that it calls."""
    return itertools.chain.from_iterable(x.graph.nodes for x in module.modules() if isinstance(x, GraphModule))


def refused_view(module: GraphModule) -> str | None:
    """Return why a graph cannot be differentiated: a view was taken of a tensor whose shape then changes in place.

    torch replays such views with the new shape, so their gradients have another shape.
    """
    for node in _nodes(module):
        name = name_of(node)
        if name in _CHANGES_SHAPE:
            users = node.all_input_nodes[0].users
            if any(user < node and not writes(user) and memory_of(user) == memory_of(node) for user in users):
                return f"{name} changes the shape of a tensor of which it has a view: use {name[:-1]} instead"
    return None


def _shift_levels(graph: Graph) -> None:
    """Replace the levels of inner transforms, which Dynamo counts from 1, by those that are opened here."""
    opened: list[Node] = []
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name in OPENS_LEVEL:
            opened.append(node)
        elif name in CLOSES_LEVEL:
            opened.pop()
        elif name in LEVEL_ARGUMENT:
            place = LEVEL_ARGUMENT[name]
            if isinstance(level := node.args[place], int):
                node.update_arg(place, opened[level - 1])


def _inline(graph: Graph) -> None:
    """Replace operators of higher order that torch.func does not know by functions that it does."""
    operators = torch.ops.higher_order
    for node in graph.nodes:
        if node.target is operators.tag_activation_checkpoint:  # compiled code decides by itself what to keep
            node.target, node.kwargs = _called, {}
        elif node.target is operators.autograd_function_apply:
            node.target = _applied
        elif node.target is operators.cond:
            node.target = _chosen
        else:  # kept from Dynamo, which would read the index
            node.target = UNREAD.get(node.target, node.target)


def _called(body: GraphModule, *args: object) -> object:
    return body.forward(*args)


def _chosen(
    condition: Tensor, if_true: GraphModule, if_false: GraphModule, operands: Sequence[object]
) -> tuple[Tensor, ...]:
    """Compute both branches of ``torch.cond`` for all samples, as torch's own rule for vmap does."""
    pairs = zip(if_true.forward(*operands), if_false.forward(*operands), strict=True)
    return tuple(torch.where(condition, one, other) for one, other in pairs)


def _applied(before: GraphModule, after: GraphModule, *args: object, **options: Leaf) -> tuple[Tensor, ...]:
    """Call an ``autograd.Function`` that Dynamo has split into two graphs.

    ``before`` gives (outputs, tensors kept for the backward pass), ``after`` takes the gradients and these tensors.
    """
    count = 0

    class Applied(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Leaf) -> Tree:
            nonlocal count
            with torch.no_grad():
                outputs, kept = before.forward(*args)
            count = len(outputs)
            return *outputs, *(x.detach() for x in kept)

        @staticmethod
        def setup_context(ctx: FunctionCtx, _inputs: object, output: tuple[Tensor, ...]) -> None:
            ctx.save_for_backward(*output[count:])
            ctx.mark_non_differentiable(
                *output[count:], *(output[place] for place in options["non_differentiable_idx"])
            )

        @staticmethod
        def backward(ctx: Tree, *grads: Tensor) -> Tree:
            with torch.no_grad():
                return after.forward(*grads[:count], *ctx.saved_tensors)

    return Applied.apply(*args)[:count]  # type: ignore[no-untyped-call, unused-ignore]


def _keep_values(graph: Graph) -> None:
    """Replace ``.item()`` and ``.data`` by the tensor itself: most operations take it as well as a number."""
    for node in graph.nodes:
        if node.op == "call_method" and node.target == "item":
            node.op, node.target = "call_function", _value
        elif getattr(node.target, "__name__", "") == GET_DATA:
            node.op, node.target = "call_method", "detach"


def _value(x: Tensor | float) -> Tensor | float:
    if not isinstance(x, Tensor):
        return x
    if x.dtype == torch.bool:
        raise RuntimeError(".item() of a bool cannot be computed for all samples at once")
    # Python's numbers do not overflow, and are more precise than half of a float.
    wide = torch.float32 if x.is_floating_point() else torch.int64
    return x.detach() if x.is_complex() or x.dtype.itemsize >= wide.itemsize else x.detach().to(wide)


def read_inputs(graph: Graph) -> list[int]:
    """Return the places of the inputs of a graph whose values it reads."""
    inputs = graph.find_nodes(op="placeholder")
    return [place for place, node in enumerate(inputs) if any(user.target is _value for user in node.users)]
