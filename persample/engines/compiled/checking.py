"""The first run of compiled code, compared with the traced graph that it was compiled from.

Inductor has compiled single operations to wrong numbers. Here the graph runs once more, operation by operation, by
torch's own kernels, on the same inputs; where the results differ, it serves from then on.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from persample._torch import OpOverload, schema
from persample.engines.compiled.straight import Run, straight, writes
from persample.errors import CompilerWarning
from persample.utils import rng
from persample.utils.origin import users_depth
from persample.utils.trees import Tree

# How many times further from the graph the code may be than the graph for inputs that are rounded otherwise.
_SPREADS = 100


class Checked:
    """Compiled code that is checked when it runs first, against the traced graph, in functional form.

    ``compiled`` compiles another graph with the same inputs, to find the operation at fault. ``noted`` says that the
    last output is a flag that invalidates the others.
    """

    def __init__(self, graph: GraphModule, code: Run, compiled: Callable[[GraphModule], Run], *, noted: bool) -> None:
        self._run = code
        self._check: _Check | None = _Check(graph, compiled, noted=noted)

    def __call__(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        """Return the outputs; the list of inputs may be emptied."""
        check = self._check
        if check is None:
            return self._run(tensors)
        inputs, before = list(tensors), check.copied(tensors)
        found = list(self._run(tensors))
        if check.noted and found[-1]:
            return found  # invalid, so that eager code serves; the next run is checked
        expected, fault = found, ""
        # Without memory for a second run, nothing is checked.
        with rng.kept(), contextlib.suppress(RuntimeError, MemoryError):
            results, differs = check.compare(inputs, before, found)
            if differs:
                expected, self._run = results, check.traced
                fault = check.fault(before)
        self._check = None
        if not fault:
            return found
        warnings.warn(
            f"engine='compiled' found that the code of torch's compiler and torch's own kernels differ in {fault}, "
            f"on the first batch (torch {torch.__version__}). From now on the traced program runs in its place, "
            "operation by operation, which is right, and slower.",
            CompilerWarning,
            stacklevel=users_depth(),
        )
        return expected


class _Check:
    """The comparison of compiled code with its graph."""

    def __init__(self, graph: GraphModule, compiled: Callable[[GraphModule], Run], *, noted: bool) -> None:
        self.noted, self.traced = noted, straight(graph)
        self._module, self._compiled = graph, compiled
        places = {node: place for place, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
        self._written = {places[x.all_input_nodes[0]]: x for x in graph.graph.nodes if writes(x)}
        self._random = _random(graph.graph)

    def copied(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors, those that the graph writes into as copies."""
        return [x.clone() if place in self._written else x for place, x in enumerate(tensors)]

    def compare(
        self, inputs: Sequence[Tensor], before: Sequence[Tensor], found: Sequence[Tensor]
    ) -> tuple[list[Tensor], bool]:
        """Return what the graph computes, and whether the code computed something else.

        ``inputs`` are those of the code, which has written into some. Where it is wrong, they get what the graph
        writes. ``before`` are the inputs as they were, and ``found`` the outputs of the code.
        """
        error = _tolerance(self._module.graph, inputs)
        expected, into = self._results(before)
        outputs: Tree = self._module.graph.output_node().args[0]
        nodes, results = [*outputs, *self._written.values()], [*expected, *into]
        of_code = [*found, *(inputs[place] for place in self._written)]
        triples = list(zip(nodes, of_code, results, strict=True))
        doubtful = [place for place, (x, one, other) in enumerate(triples) if not self._is_close(x, one, other, error)]
        # Differences of rounded numbers may be rounding errors alone: those of the graph for inputs rounded otherwise.
        rounded = [self._results(_perturbed(before, seed)) for seed in range(2 if doubtful else 0)]
        others = [[*one, *two] for one, two in rounded]
        spreads = [max(_difference(other[place], results[place]) for other in others) for place in doubtful]
        distances = [_difference(of_code[place], results[place]) for place in doubtful]
        differs = not all(far <= _SPREADS * spread for far, spread in zip(distances, spreads, strict=True))
        for place, x in zip(self._written, into, strict=True) if differs else ():
            inputs[place].copy_(x)
        return expected, differs

    def fault(self, before: Sequence[Tensor]) -> str:
        """Return the first operation whose result differs where the code returns that of each; "the loss" for none."""
        module = self._module
        values, copy, copies = list(filter(_is_value, module.graph.nodes)), Graph(), dict[Node, Node]()
        copy.graph_copy(module.graph, copies)
        copy.output([copies[node] for node in values])
        every, error = GraphModule(module, copy), _tolerance(module.graph, before)
        try:
            found, expected = (run(self.copied(before)) for run in (self._compiled(every), straight(every)))
        except (RuntimeError, MemoryError, OSError):  # of the compiler, for a larger graph
            return "the loss"
        triples = zip(values, found, expected, strict=True)
        names = (str(x.target) for x, one, other in triples if not self._is_close(x, one, other, error))
        return next(names, "the loss")

    def _results(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs of the graph, and the inputs that it has written into."""
        given = self.copied(tensors)
        outputs = list(self.traced(list(given)))
        return outputs, [given[place] for place in self._written]

    def _is_close(self, node: Node, one: Tensor, other: Tensor, error: float) -> bool:
        return node in self._random or _is_close(one, other, error)


def _perturbed(tensors: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Return tensors whose floating elements are changed by a few units in the last place."""
    draw = torch.Generator().manual_seed(seed)

    def changed(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        noise = torch.randn(x.shape, generator=draw).to(x.device, x.dtype)
        return torch.empty_like(x).copy_(x * (1 + torch.finfo(x.dtype).eps * noise))

    return list(map(changed, tensors))


def _random(graph: Graph) -> set[Node]:
    """Return the nodes whose values depend on random numbers, which compiled code draws in another order."""
    random: set[Node] = set()
    for node in graph.nodes:
        draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if draws or not random.isdisjoint(node.all_input_nodes):
            random.add(node)
    return random


def _is_value(node: Node) -> bool:
    """Return whether a node computes one tensor."""
    is_operation = isinstance(node.target, OpOverload) and not writes(node)
    return is_operation and [str(x.type) for x in schema(node.target).returns] == ["Tensor"]


def _tolerance(graph: Graph, inputs: Sequence[Tensor]) -> float:
    """Return √ε of the least precise dtype of a graph's inputs, and of those that it converts to."""
    values = (x for node in graph.nodes for x in (*node.args, *node.kwargs.values()))
    dtypes = {x.dtype for x in inputs}.union(x for x in values if isinstance(x, torch.dtype))
    return math.sqrt(max((torch.finfo(x).eps for x in dtypes if x.is_floating_point or x.is_complex), default=0.0))


def _is_close(one: Tensor, other: Tensor, error: float) -> bool:
    """Return whether elements differ by at most the error times the largest finite one; NaN equals NaN."""
    if one.shape != other.shape or not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    size = other.abs().double()
    scale = torch.where(size.isfinite(), size, 0).amax().item() if other.numel() else 0.0
    return _difference(one, other) <= error * scale


def _difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of elements; infinity where only one is NaN, or infinite, or the shapes differ."""
    if one.shape != other.shape:
        return math.inf
    dtype = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(dtype), other.to(dtype)
    apart = torch.where((one == other) | (one.isnan() & other.isnan()), 0, (one - other).abs())
    return torch.where(apart.isnan(), math.inf, apart).amax().item() if apart.numel() else 0.0
