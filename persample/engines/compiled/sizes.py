"""One program for all batch sizes: a task is traced at two, and comparing the graphs shows what depends on the size.

Most batching rules of torch.func turn torch's own symbolic sizes into constants, so these cannot be used in the trace.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from persample._torch import cond, scan
from persample.engines.compiled.task import Task
from persample.engines.compiled.trace import Format, Size, Traced, TraceError, trace
from persample.errors import ArgumentError
from persample.factors import cost_model
from persample.utils import trees

# Primes, because other sizes are unlikely to be multiples of them; with a multiple of 64 or 1024 between them, and a
# difference by which few quotients are divisible, so that numbers of blocks and halves are no formulas of the size.
_SIZES = (1009, 1061)
Axes: TypeAlias = tuple[tuple[int, int], ...]  # (input, axis): all axes of inputs that have the batch size


def axes_of_samples(batched: Sequence[bool]) -> Axes:
    """Return the first axis of every input that has one row per sample."""
    return tuple((place, 0) for place, split in enumerate(batched) if split)


def axes_between(one: Sequence[Format], other: Sequence[Format]) -> Axes | None:
    """Return the axes that differ between two calls, or None if more than the batch size differs."""
    changes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for place, (a, b) in enumerate(zip(one, other, strict=True)):
        if not (_is_contiguous(a) and _is_contiguous(b)) and (a.shape, a.stride) != (b.shape, b.stride):
            return None
        for axis, sizes in enumerate(zip(a.shape, b.shape, strict=True)):
            if sizes[0] != sizes[1]:
                changes.setdefault(sizes, []).append((place, axis))
    return tuple(*changes.values()) if len(changes) == 1 else None


@dataclass(frozen=True)
class AnySize:
    """A task as one graph for all batch sizes."""

    axes: Axes  # the axes of inputs that have the batch size
    formats: list[Format]  # the formats of the inputs in one call
    traced: Traced  # the trace at the last size
    graph: GraphModule  # the graph for all sizes

    @classmethod
    def of(cls, task: Task, axes: Axes) -> AnySize | None:
        """Return the graph of a task for all batch sizes, or None if no single graph serves them."""
        formats = [Format.of(x) for x in task.tensors]
        try:
            made = (partial(_at, formats, axes, size) for size in _SIZES)
            one, other = (trace(task, inputs, any_size=True, compiles=task.compiles) for inputs in made)
            graph = unified(one.graph, other.graph, _SIZES, axes[0])
        except (TraceError, ArgumentError, UnlikeError):  # an ArgumentError comes again, of the program for one size
            return None
        return cls(axes, formats, other, graph) if _is_alike(one, other) else None

    def inputs(self, size: Size) -> list[Tensor]:
        """Return uninitialized tensors in the formats of the inputs at some batch size."""
        return _at(self.formats, self.axes, size)

    def size(self, formats: Sequence[Format]) -> int | None:
        """Return the batch size of a call, or None if the call differs in more than its size."""
        size = formats[self.axes[0][0]].shape[self.axes[0][1]]
        return size if _forms(self.formats, self.axes, size) == [(f.shape, f.stride) for f in formats] else None

    def fits_memory(self, size: int) -> bool:
        """Return whether the graph, which does not work in blocks, may write out its gradients at some batch size."""
        return self.traced.written * size / _SIZES[-1] <= cost_model.AT_ONCE


def _forms(formats: Sequence[Format], axes: Axes, size: Size) -> list[tuple[tuple[Size, ...], tuple[Size, ...]]]:
    """Return the shape and strides of every input at another batch size."""
    shapes: list[list[Size]] = [list(f.shape) for f in formats]
    for place, axis in axes:
        shapes[place][axis] = size
    moved = {place for place, _ in axes}
    pairs = enumerate(zip(formats, shapes, strict=True))
    return [(tuple(shape), contiguous(shape) if place in moved else f.stride) for place, (f, shape) in pairs]


def _at(formats: Sequence[Format], axes: Axes, size: Size) -> list[Tensor]:
    return [f.empty(*form) for f, form in zip(formats, _forms(formats, axes, size), strict=True)]


def _is_alike(one: Traced, other: Traced) -> bool:
    """Return whether two traces agree in all but their graphs; constants that tracing made are compared by value."""
    if (one.outline, one.noted, len(one.captured)) != (other.outline, other.noted, len(other.captured)):
        return False
    pairs = zip(one.captured, other.captured, strict=True)
    return all(x is y or (Format.of(x) == Format.of(y) and torch.equal(x, y)) for x, y in pairs)


def contiguous(shape: Sequence[Size]) -> tuple[Size, ...]:
    """Return the strides of a contiguous tensor."""
    steps = itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1)
    return tuple(reversed(list(steps)))[-len(shape) :] if shape else ()


def _is_contiguous(f: Format) -> bool:
    wanted = contiguous(f.shape)
    return all(size == 1 or a == b for size, a, b in zip(f.shape, f.stride, wanted, strict=True)) or 0 in f.shape


class UnlikeError(Exception):
    """Raised for graphs that differ in more than integers of the form a + b · size."""


def unified(
    one: GraphModule, other: GraphModule, sizes: tuple[int, int], axis: tuple[int, int] | None = None
) -> GraphModule:
    """Return the graph for all sizes, from two; the size is that of an input's axis, or else the last input."""
    if len(one.graph.nodes) != len(other.graph.nodes):
        raise UnlikeError
    result, root, made, of_other = Graph(), torch.nn.Module(), dict[Node, Node](), dict[Node, Node]()
    inputs = one.graph.find_nodes(op="placeholder")
    size: Node | None = None

    def merged(value: Argument, second: Argument) -> Argument:
        if isinstance(value, Node) and isinstance(second, Node) and made[value] is of_other.get(second):
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


def _formula(graph: Graph, size: Node | None, sizes: tuple[int, int], values: tuple[int, int]) -> Argument:
    """Return the node of the integer a + b · size that has these values at the sizes; else ``UnlikeError``.

    It is no such function if b is a fraction, or if a is negative and large: of a polynomial of a higher degree it is
    at most minus the product of the sizes.
    """
    step, rest = divmod(values[1] - values[0], sizes[1] - sizes[0])
    first = values[0] - step * sizes[0]
    if rest or first < -sizes[0] * sizes[1] // 2:
        raise UnlikeError
    product = size if step == 1 else graph.call_function(operator.mul, (size, step))
    return graph.call_function(operator.add, (product, first)) if first else product
