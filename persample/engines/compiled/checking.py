"""The first run of compiled code, compared with the traced graph that it was compiled from.

Inductor has compiled single operations to wrong numbers. Here the graph runs once more, operation by operation, by
torch's own kernels, on the same inputs; where the results differ, it serves from then on.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from persample._torch import OpOverload, schema
from persample.engines.compiled.straight import Run, owner, returns_memory, straight, writes
from persample.errors import CompilerWarning
from persample.utils import rng
from persample.utils.origin import users_depth


class Checked:
    """Compiled code that is checked when it runs first.

    Args:
        graph: the traced graph.
        code: the compiled graph.
        compiled: compiles another graph with the same inputs, to find the operation at fault.
        noted: whether the last output is a flag that invalidates the others.
    """

    def __init__(self, graph: GraphModule, code: Run, compiled: Callable[[GraphModule], Run], *, noted: bool) -> None:
        self._graph, self._run, self._compiled, self._noted = graph, code, compiled, noted
        self._is_checked = False

    def __call__(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        """Return the outputs.

        Args:
            tensors: the inputs; the list is emptied.
        """
        if self._is_checked:
            return self._run(tensors)
        graph, inputs = self._graph.graph, list(tensors)
        written = _written(graph)
        before = _copied(inputs, written)
        found = list(self._run(tensors))
        if self._noted and found[-1]:
            return found  # invalid, so that eager code serves; the next run is checked
        traced, again = straight(self._graph), _copied(before, written)
        start = rng.snapshot()
        expected = list(traced(list(again)))
        self._is_checked, error, random = True, _tolerance(graph, inputs), _random(graph)
        outputs: Any = graph.output_node().args[0]
        triples = [*zip(outputs, found, expected, strict=True)]
        triples += [(node, inputs[place], again[place]) for place, node in written.items()]
        if not all(node in random or _is_close(one, other, error) for node, one, other in triples):
            fault, self._run = self._fault(before, written, error), traced
            warnings.warn(
                f"engine='compiled' found that the code of torch's compiler and torch's own kernels differ in {fault}, "
                f"on the first batch (torch {torch.__version__}). From now on the traced program runs in its place, "
                "operation by operation, which is right, and slower.",
                CompilerWarning,
                stacklevel=users_depth(),
            )
            for place in written:
                inputs[place].copy_(again[place])
            found = expected
        rng.rewind(start)
        return found

    def _fault(self, before: Sequence[Tensor], written: Collection[int], error: float) -> str:
        """Return the first operation whose result differs where the code returns that of each; "the loss" for none."""
        values, copy, copies = list(filter(_is_value, self._graph.graph.nodes)), Graph(), dict[Node, Node]()
        copy.graph_copy(self._graph.graph, copies)
        copy.output([copies[node] for node in values])
        every = GraphModule(self._graph, copy)
        found, expected = (run(_copied(before, written)) for run in (self._compiled(every), straight(every)))
        random = _random(self._graph.graph)
        triples = zip(values, found, expected, strict=True)
        names = (str(x.target) for x, one, other in triples if x not in random and not _is_close(one, other, error))
        return next(names, "the loss")


def _copied(tensors: Sequence[Tensor], places: Collection[int]) -> list[Tensor]:
    return [x.clone() if place in places else x for place, x in enumerate(tensors)]


def _written(graph: Graph) -> dict[int, Node]:
    """Return the inputs that a graph writes into, by place."""
    nodes = {owner(x) for node in graph.nodes if writes(node) for x in node.all_input_nodes[:1]}
    return {place: node for place, node in enumerate(graph.find_nodes(op="placeholder")) if node in nodes}


def _random(graph: Graph) -> set[Node]:
    """Return the nodes whose values depend on random numbers, which compiled code draws in another order."""
    random: set[Node] = set()
    for node in graph.nodes:
        draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if draws or not random.isdisjoint(node.all_input_nodes):
            random |= {node, *([owner(node.all_input_nodes[0])] if writes(node) else [])}
    return random


def _is_value(node: Node) -> bool:
    """Return whether a node computes a tensor of its own."""
    if not isinstance(node.target, OpOverload) or writes(node) or returns_memory(node):
        return False
    return [str(x.type) for x in schema(node.target).returns] == ["Tensor"]


def _tolerance(graph: Graph, inputs: Sequence[Tensor]) -> float:
    """Return √ε of the least precise dtype of a graph's inputs, and of those that it converts to."""
    dtypes = {x.dtype for x in inputs} | set(_dtypes(graph))
    return math.sqrt(max((torch.finfo(x).eps for x in dtypes if x.is_floating_point or x.is_complex), default=0.0))


def _dtypes(graph: Graph) -> Iterator[torch.dtype]:
    for node in graph.nodes:
        yield from (x for x in (*node.args, *node.kwargs.values()) if isinstance(x, torch.dtype))


def _is_close(one: Tensor, other: Tensor, error: float) -> bool:
    """Return whether elements differ by at most the error times the largest finite one; NaN equals NaN."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    one, other = one.double(), other.double()
    scale = torch.where(other.isfinite(), other, 0).abs().amax() if other.numel() else 0
    return torch.allclose(one, other, rtol=0, atol=float(error * scale), equal_nan=True)
