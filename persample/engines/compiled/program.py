"""A program: its inputs, its outputs, and the conditions under which it may be used again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from persample._torch import FakeTensorMode, enable_python_dispatcher, symbolic_size
from persample.engines.compiled.lower import decomposed, functional, lower
from persample.engines.compiled.packing import Outline
from persample.engines.compiled.sizes import AnySize, Axes
from persample.engines.compiled.straight import Run, straight
from persample.engines.compiled.task import Task
from persample.engines.compiled.trace import Format, trace
from persample.utils.numerics import full_precision, memory

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


class DoubtfulError(ArithmeticError):
    """Raised by a program whose results are invalid: an index is out of range, or a number is too large or small."""


@dataclass
class Program:
    """Code, compiled or not, with the conditions of its use."""

    run: Run
    constants: list[Tensor]  # the tensors that tracing made, which are the last inputs of the code
    outline: Outline  # the tree of the result
    noted: bool  # whether the last output is a flag that invalidates the others
    fits: Callable[[Sequence[Format]], bool]  # from the formats of the inputs to whether the program serves their sizes
    batch_size: int | None  # the number of samples, or None for any
    _shared: list[int] | None = field(default=None)

    def __call__(self, tensors: list[Tensor]) -> object:
        """Return the result, whose tensors share no memory with an input or with one another."""
        tensors = [*tensors, *self.constants]
        given = None if self._shared is not None else [memory(x) for x in tensors]
        outputs = list(self.run(tensors))
        if self.noted and outputs.pop():
            raise DoubtfulError
        if given is not None:
            self._shared = _sharing(outputs, given)
        for place in self._shared or ():
            outputs[place] = outputs[place].clone()
        return self.outline.filled(outputs)


def for_one_size(task: Task) -> Program:
    """Return a program for the sizes of one task."""
    formats = [Format.of(x) for x in task.tensors]
    traced = trace(task, lambda: [f.empty() for f in formats], compiles=task.compiles)
    if task.compiles:
        mode = FakeTensorMode(shape_env=_shape_env())
        with mode:
            inputs = [f.empty() for f in [*formats, *map(Format.of, traced.captured)]]
        with full_precision(inputs[0].device):  # autocast applied when the loss was traced
            graph = functional(traced.graph, mode, inputs)
            run = lower(graph, decomposed(graph, mode, inputs), mode, inputs, traced.noted)
    else:
        run = operation_by_operation(traced.graph)
    return Program(run, traced.captured, traced.outline, traced.noted, formats.__eq__, task.call.size)


def for_any_size(task: Task, axes: Axes) -> Program | None:
    """Return a program for all batch sizes; None if no single graph serves them."""
    family = AnySize.of(task, axes)
    if family is None:
        return None
    env, traced = _shape_env(), family.traced
    mode = FakeTensorMode(shape_env=env)
    size = symbolic_size(mode, task.call.size)
    with mode:
        inputs = family.inputs(size)
        inputs += [Format.of(x).empty() for x in traced.captured]
    with full_precision(inputs[0].device):
        try:
            graph = functional(family.graph, mode, inputs) if task.compiles else family.graph
            flat = decomposed(graph, mode, inputs) if task.compiles else _guarded(graph, mode, inputs)
        except (RuntimeError, ValueError):  # some operations of torch refuse symbolic sizes
            return None
        if not _allows(env, task.call.size):
            return None
        run = lower(graph, flat, mode, inputs, traced.noted) if task.compiles else operation_by_operation(graph)

    def fits(formats: Sequence[Format]) -> bool:
        size = family.size(formats)
        return size is not None and _allows(env, size) and family.fits_memory(size)

    program = Program(run, traced.captured, traced.outline, traced.noted, fits, None)
    return program if fits(family.formats) else None


def _guarded(graph: GraphModule, mode: FakeTensorMode, inputs: Sequence[Tensor]) -> GraphModule:
    """Run a graph on symbolic sizes, which notes what it takes for granted of them, and return it."""
    with mode, enable_python_dispatcher():
        Interpreter(graph).run(*inputs)
    return graph


def operation_by_operation(graph: GraphModule) -> Run:
    """Return code that runs a graph as it is; where torch refuses a value, its results are invalid."""
    run = straight(graph)

    def checked(tensors: list[Tensor]) -> Sequence[Tensor]:
        try:
            return run(tensors)
        except torch.OutOfMemoryError:
            raise
        except (IndexError, RuntimeError) as error:  # an index out of range, say: eager code names it
            raise DoubtfulError from error

    return checked


def _shape_env() -> ShapeEnv:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # importing it takes half a second

    return ShapeEnv()


def _allows(env: ShapeEnv, size: int) -> bool:
    """Return whether a size satisfies the guards that were placed on its symbolic size."""
    if size < 2 or env.replacements:
        return False
    values = dict.fromkeys(env.backed_var_to_val, size)
    return all(bool(guard.expr.xreplace(values)) for guard in env.guards)


def _sharing(outputs: Sequence[Tensor], taken: Sequence[int]) -> list[int]:
    """Return the positions of outputs that share memory with an input or with an earlier output."""
    seen, shared = set(taken), []
    for place, x in enumerate(outputs):
        if x.numel() and memory(x) in seen:
            shared.append(place)
        seen.add(memory(x))
    return shared
