"""Graphs of Dynamo, rewritten so that torch.func can batch and differentiate them.

Dynamo records what torch.compile supports, and torch.func lacks some of it: activation checkpoints, old-style
``autograd.Function``s, ``.item()``, writes of per-sample values into a tensor that the loss made for all samples. It
also records the levels of inner transforms as constants, though these lie above our own levels here.

What a loss keeps outside, such as a count of its calls, is a result of the graph, and Dynamo stores there what the
graph returns for it. Numbers of Python must be computed apart, because torch.func takes none. So must tensors that
depend on no argument (NumPy's numbers are such): what stands for a result would be stored, and read by the next call.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.fx import Graph, GraphModule, Node

from persample._torch import (
    CLOSES_LEVEL,
    GET_DATA,
    LEVEL_ARGUMENT,
    OPENS_LEVEL,
    SETS_MODE,
    is_number_input,
    source_of,
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
    """Return what identifies a tensor's memory in a graph of Dynamo; None of all else, and in inner transforms."""
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


def refused_view(module: GraphModule) -> str | None:
    """Return why a graph cannot be differentiated: a view was taken of a tensor whose shape then changes in place.

    torch replays such views with the new shape, so their gradients have another shape.
    """
    graphs = (x.graph for x in module.modules() if isinstance(x, GraphModule))  # and those that it calls
    for node in itertools.chain.from_iterable(graph.nodes for graph in graphs):
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


_SIZE = re.compile(r"\.(size\(\)\[\d+\]|stride\(\)\[\d+\]|storage_offset\(\))$")  # they tell calls of one graph apart
CHANGES_A_NUMBER = "the function changes a number that its result depends on"


class Split(NamedTuple):
    """A graph of Dynamo without its numbers."""

    graph: GraphModule  # the graph that is left, from tensors to tensors
    used: list[int]  # the places of its inputs among those of the whole graph
    outputs: dict[int, int]  # the tensors among the outputs of the whole graph: their places among those left
    kept: list[int]  # the outputs of the whole graph that ``compute`` returns
    compute: Callable[..., list[object]]  # from the inputs of the whole graph to the outputs that need no argument


def split_kept(module: GraphModule) -> Split | None:
    """Take out of a graph the numbers, and what only they depend on; and tell which outputs depend on no argument.

    The graph is not changed: Dynamo reads it again. None if there are no such numbers and outputs. A ``RuntimeError``
    if a tensor depends on a number that the function changes: it would be another at every call.
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
