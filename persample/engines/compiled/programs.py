"""The programs of a captured loss: for each kind of call one for its batch size, and then one for all batch sizes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from persample._torch import FakeTensorMode, compiling, enable_python_dispatcher, symbolic_size
from persample.engines.compiled.capture import entry_of, forget
from persample.engines.compiled.graph import Compilation
from persample.engines.compiled.lower import decomposed, functional, lower
from persample.engines.compiled.sizes import AnySize, Axes, axes_between, axes_of_samples
from persample.engines.compiled.straight import Run, straight
from persample.engines.compiled.task import Task, UnfinishedError
from persample.engines.compiled.trace import Format, Outline, TraceError, trace
from persample.errors import LossError, RecompilationWarning, TorchVersionError
from persample.utils.isolation import after_imports, in_one_thread
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


_MOST_FAMILIES = 64
_MOST_PROGRAMS = 16
_OFTEN = 8
_SIZES = "sizes, dtypes or strides of params or batch, or an integer that it reads"


class FaultError(Exception):
    """Raised for a program whose compilation failed before: it would fail again, after as long a time."""


@dataclass
class Family:
    """The programs of one kind of call, which differ in sizes."""

    programs: list[Program] = field(default_factory=list)  # the programs, the latest last
    seen: list[list[Format]] = field(default_factory=list)  # the formats of the inputs of each program
    failure: TraceError | UnfinishedError | None = None  # the error that says why there is no program, or None
    faults: dict[tuple[Format, ...], str] = field(default_factory=dict)  # for inputs that fail, the error
    takes_any_size: bool = True  # False once tracing has shown that no program serves all batch sizes


def clear_cache() -> None:
    """Forget all compiled programs, and torch's record of the losses that they were compiled from.

    Inductor's cache on disk stays, so the same program compiles fast again.

    Examples:
        >>> from persample import clear_cache
        >>> clear_cache()
    """
    forget()


def compilations_of(loss_fn: Callable[..., object]) -> tuple[Compilation, ...]:
    """Return the compilations of the programs of a loss, in order."""
    return tuple(entry_of(loss_fn).history.compilations)


@in_one_thread
def program_of(task: Task) -> Program:
    """Return the program of a captured task, made now if there is none."""
    formats = [Format.of(x) for x in task.tensors]
    family = _family(task, (task.structure, tuple((len(f.shape), f.dtype, f.device) for f in formats)))
    found = next((p for p in reversed(family.programs) if p.fits(formats)), None)
    if found is None:
        if family.failure:
            raise type(family.failure)(*family.failure.args)  # a new one: each raise adds frames to an error
        if fault := family.faults.get(tuple(formats)):
            raise FaultError(fault)
        with compiling():
            found = after_imports(lambda: _compiled(family, task, formats))
    return found


def _family(task: Task, key: Hashable) -> Family:
    if task.loss.capture is None:
        return Family()
    programs, history = task.loss.capture.programs, task.loss.capture.history
    history.batch_sizes.add(task.call.size)
    family = programs.setdefault(key, Family())
    programs.move_to_end(key)
    while len(programs) > _MOST_FAMILIES:
        programs.popitem(last=False)
    return family


def _compiled(family: Family, task: Task, formats: list[Format]) -> Program:
    start = time.perf_counter()
    try:
        axes = _axes(family, task, formats)
        program = for_any_size(task, axes) if axes else None
        if program is None:
            family.takes_any_size = family.takes_any_size and not axes
            program = for_one_size(task)
    except (TraceError, UnfinishedError) as error:
        family.failure = type(error)(str(error))  # without the traceback, which would keep the batch alive
        raise
    except (LossError, TorchVersionError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if len(family.faults) < _MOST_PROGRAMS:
            family.faults[tuple(formats)] = f"{type(error).__name__}: {error}"
        raise
    _notice(task, family, program, time.perf_counter() - start)
    family.programs = [*family.programs, program][-_MOST_PROGRAMS:]
    family.seen = [*family.seen, formats][-_MOST_PROGRAMS:]
    return program


def _axes(family: Family, task: Task, formats: list[Format]) -> Axes | None:
    """Return the axes of the batch size if several sizes were seen, so that one program for all of them pays."""
    # torch's symbolic sizes exclude 0 and 1; a number of units is no formula a + b · B.
    if task.call.size < 2 or not family.takes_any_size or task.call.units is not None:
        return None
    if not family.seen:
        varies = task.loss.capture is not None and len(task.loss.capture.history.batch_sizes) > 1
        return axes_of_samples(task.batched) if varies else None
    found = (axes_between(before, formats) for before in reversed(family.seen))
    axes = next((axes for axes in found if axes is not None), None)
    # Of a length of each sample, the trace of a recurrent layer would have a thousand steps.
    inside = axes is not None and any(task.batched[place] for place, _ in axes)
    return None if inside and not {*axes_of_samples(task.batched)}.issubset(axes or ()) else axes


def _notice(task: Task, family: Family, program: Program, seconds: float) -> None:
    """Record a compilation, and warn if the same loss is compiled again and again for the same reductions."""
    if task.loss.capture is None:
        return
    graph, names = task.loss.capture, tuple(type(reduction).__name__ for reduction in task.reductions.reductions)
    alike = [x for x in graph.history.compilations if (x.engine, x.reductions) == (task.engine, names)]
    reason = ""
    if alike:
        others = [x for x in graph.programs.values() if x is not family and x.programs]
        reason = "batch size" if family.programs else (not others and graph.reason) or _SIZES
    graph.history.compilations.append(Compilation(task.engine, names, program.batch_size, seconds, reason))
    if len(alike) + 1 == _OFTEN:
        warnings.warn(
            f"engine={task.engine!r} {'compiles' if task.compiles else 'traces'} the same loss_fn for the {_OFTEN}th "
            f"time, because this changed: {reason}. It costs {'seconds' if task.compiles else 'part of a second'} each "
            "time. Pass what changes in batch (unbatched, with None in in_dims) or as a tensor, or use engine='eager'.",
            RecompilationWarning,
            stacklevel=2,
        )
