"""One program for many sizes: the task is traced at a few sizes, and comparing the graphs finds what depends on them.

Most batching rules of torch.func turn torch's own symbolic shapes into constants, so these cannot be used.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from persample.engines.compiled.task import Task
from persample.engines.compiled.trace import Format, Traced, TraceError, trace
from persample.engines.compiled.unify import unified
from persample.factors import cost_model
from persample.utils import trees

# One tuple per size that may vary independently. Primes, because other sizes are unlikely to be multiples of them.
_SIZES = ((1009, 1013, 1019), (1511, 1523, 1531))


@dataclass(frozen=True)
class Varying:
    """The sizes that vary from call to call; sizes that are equal in every call count as one.

    Args:
        symbols: for each independent size, all places (input, axis) that have it.
    """

    symbols: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def between(cls, one: Sequence[Format], other: Sequence[Format]) -> Varying | None:
        """Return the sizes that differ between two calls, or None if none do, or too many for one program.

        Args:
            one: the formats of the inputs of one call.
            other: the formats of the inputs of another call.
        """
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            if not (_is_contiguous(a) and _is_contiguous(b)) and (a.shape, a.stride) != (b.shape, b.stride):
                return None
            for axis, sizes in enumerate(zip(a.shape, b.shape, strict=True)):
                if sizes[0] != sizes[1]:
                    groups.setdefault(sizes, []).append((place, axis))
        return cls(tuple(map(tuple, groups.values()))) if 0 < len(groups) <= len(_SIZES) else None

    @classmethod
    def batch(cls, batched: Sequence[bool]) -> Varying:
        """Return the batch size alone.

        Args:
            batched: for each input, whether its first axis is that of the samples.
        """
        return cls((tuple((place, 0) for place, split in enumerate(batched) if split),))

    @property
    def places(self) -> list[tuple[int, int]]:
        """The first place of each size."""
        return [places[0] for places in self.symbols]

    def is_batch_only(self, task: Task) -> bool:
        """Return whether only the batch size varies, which the loss does not see.

        Args:
            task: the task whose inputs vary.
        """
        batched = task.batched
        return all(axis == 0 and batched[place] for places in self.symbols for place, axis in places)

    def of(self, formats: Sequence[Format]) -> tuple[int, ...] | None:
        """Return the sizes in a call, or None if places of the same size differ.

        Args:
            formats: the formats of the inputs of the call.
        """
        found = [{formats[place].shape[axis] for place, axis in places} for places in self.symbols]
        return tuple(sizes.pop() for sizes in found) if all(len(sizes) == 1 for sizes in found) else None

    def fixed(self, formats: Sequence[Format]) -> list[tuple[Any, ...]]:
        """Return the shapes and strides that must be equal in all calls, with -1 for the sizes that vary.

        Args:
            formats: the formats of the inputs of a call.
        """
        return self.forms(formats, [-1] * len(self.symbols))

    def forms(self, formats: Sequence[Format], sizes: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return the shape and strides of every input at other sizes.

        Args:
            formats: the formats of the inputs of a call.
            sizes: one for each independent size.
        """
        shapes = [list(f.shape) for f in formats]
        for size, places in zip(sizes, self.symbols, strict=True):
            for place, axis in places:
                shapes[place][axis] = size
        moved = {place for places in self.symbols for place, _ in places}
        pairs = enumerate(zip(formats, shapes, strict=True))
        return [(tuple(shape), contiguous(shape) if n in moved else f.stride) for n, (f, shape) in pairs]

    def points(self) -> list[tuple[int, ...]]:
        """Return the sizes to trace at: the corners that determine a formula, and one more point to check it."""
        used = _SIZES[: len(self.symbols)]
        return [*itertools.product(*(sizes[:2] for sizes in used)), tuple(sizes[2] for sizes in used)]


@dataclass
class Sizes:
    """A task as one graph for many sizes.

    Args:
        varying: the sizes that vary.
        formats: the formats of the inputs in one call.
        traces: one trace at each of ``varying.points()``.
        graph: the graph for all sizes.
        written: the largest number of gradient elements that the graph writes out at a time, at the last point.
        checked: sizes for which a trace confirmed the graph, where the loss sees the sizes and may branch on them.
    """

    varying: Varying
    formats: list[Format]
    traces: list[Traced]
    graph: GraphModule
    written: int
    checked: set[tuple[int, ...]] = field(default_factory=set)

    @classmethod
    def of(cls, task: Task, varying: Varying) -> Sizes | None:
        """Return the graph of a task for all sizes, or None if no single graph serves them.

        Args:
            task: the task.
            varying: the sizes that vary.
        """
        formats, points = [Format.of(x) for x in task.tensors], varying.points()
        traces = [trace(task, partial(_at, formats, varying, point), any_size=True) for point in points]
        graph = unified([traced.graph for traced in traces], points, varying.places)
        if graph is None or varying.of(formats) is None or not all(_is_alike(x, traces[0]) for x in traces):
            return None
        return cls(varying, formats, traces, graph, max(traced.written for traced in traces))

    @property
    def traced(self) -> Traced:
        """The first trace; the others differ from it in sizes only."""
        return self.traces[0]

    def inputs(self, sizes: Sequence[Any]) -> list[Tensor]:
        """Return uninitialized tensors in the format of the inputs at some sizes.

        Args:
            sizes: one for each independent size.
        """
        return _at(self.formats, self.varying, sizes)

    def sizes(self, formats: Sequence[Format]) -> tuple[int, ...] | None:
        """Return the sizes in a call, or None if the call differs in more than these sizes.

        Args:
            formats: the formats of the inputs of the call.
        """
        alike = self.varying.fixed(formats) == self.varying.fixed(self.formats)
        return self.varying.of(formats) if alike else None

    def holds(self, task: Task, sizes: tuple[int, ...]) -> bool:
        """Return whether the graph computes a task at some sizes.

        Args:
            task: a task that differs from the traced one in these sizes only.
            sizes: one for each independent size.
        """
        points = self.varying.points()
        share = max(size / point for size, point in zip(sizes, points[-1], strict=True))
        if not cost_model.fits_at_once(self.written * share):
            return False
        if self.varying.is_batch_only(task) or sizes in self.checked:
            return True
        try:
            again = trace(task, lambda: self.inputs(sizes), any_size=True)
        except TraceError:
            return False
        graphs = [traced.graph for traced in [*self.traces, again]]
        if not _is_alike(again, self.traced) or unified(graphs, [*points, sizes], self.varying.places) is None:
            return False
        self.checked.add(sizes)
        return True


def _at(formats: Sequence[Format], varying: Varying, sizes: Sequence[Any]) -> list[Tensor]:
    return [f.empty(*form) for f, form in zip(formats, varying.forms(formats, sizes), strict=True)]


def _is_alike(one: Traced, other: Traced) -> bool:
    """Return whether two traces agree in all but their graphs; constants that tracing made are compared by value."""
    pairs = list(zip(one.captured, other.captured, strict=False))
    same = len(one.captured) == len(other.captured) and all(x is y or _is_equal(x, y) for x, y in pairs)
    return (one.outline, one.noted) == (other.outline, other.noted) and same


def _is_equal(x: Tensor, y: Tensor) -> bool:
    return Format.of(x) == Format.of(y) and torch.equal(x, y)


def contiguous(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Return the strides of a contiguous tensor.

    Args:
        shape: its shape.
    """
    steps = itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1)
    return tuple(reversed(list(steps)))[-len(shape) :] if shape else ()


def _is_contiguous(f: Format) -> bool:
    wanted = contiguous(f.shape)
    return all(size == 1 or a == b for size, a, b in zip(f.shape, f.stride, wanted, strict=True)) or 0 in f.shape
