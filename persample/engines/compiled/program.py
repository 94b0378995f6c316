"""A compiled program: what it was traced from, and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from persample._torch import FakeTensorMode, symbol_source
from persample.engines.compiled.lower import Run, functional, lower
from persample.engines.compiled.packing import unpack
from persample.engines.compiled.reads import Reads
from persample.engines.compiled.sizes import Sizes, Varying
from persample.engines.compiled.task import Task
from persample.engines.compiled.trace import Format, Traced, trace
from persample.outputs import memory

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


class DoubtfulError(ArithmeticError):
    """Raised by a program for numbers so large or small that it was not made for them."""


@dataclass
class Program:
    """Compiled code with what surrounds it.

    Args:
        run: the code.
        captured: the tensors behind its last inputs: numbers of those that were read, or tensors held as they are.
        values: of tensors that were read, the values that the code relies on.
        outline: what makes the result of the outputs.
        noted: whether the last output tells that the others do not count.
        fits: whether the sizes of a call are among those it was made for.
    """

    run: Run
    captured: list[int | Tensor]
    values: list[tuple[int | Tensor, Any]]
    outline: Any
    noted: bool
    fits: Callable[[Task, Sequence[Format]], bool]
    _shared: list[int] | None = field(default=None)

    def holds(self, reads: Reads) -> bool:
        """Return whether the values that it relies on are what they were.

        Args:
            reads: what the loss reads now.
        """
        return not self.values or all(repr(_found(x, reads).tolist()) == repr(value) for x, value in self.values)

    def inputs(self, reads: Reads) -> list[Tensor]:
        """Return its last inputs.

        Args:
            reads: what the loss reads now.
        """
        return [_found(x, reads) for x in self.captured]

    def __call__(self, tensors: list[Tensor]) -> Any:
        """Return the result.

        Args:
            tensors: all inputs.
        """
        return unpack(self.outline, self.outputs(tensors))

    def outputs(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run the code.

        Args:
            tensors: all inputs.

        Returns:
            The tensors of the result, none of which shares memory with an input or with another.

        Raises:
            DoubtfulError: if the numbers are too large or too small for it.
        """
        given = None if self._shared is not None else [memory(x) for x in tensors]
        outputs = list(self.run(tensors))
        if self.noted and outputs.pop():
            raise DoubtfulError
        if given is not None:
            self._shared = _sharing(outputs, given)
        for place in self._shared or ():
            outputs[place] = outputs[place].clone()
        return outputs


def static(task: Task, reads: Reads) -> Program:
    """Return a program for the sizes of one task.

    Args:
        task: what to compute.
        reads: what its loss reads.
    """
    formats = [Format.of(x) for x in task.tensors]
    traced = trace(task, lambda: [f.empty() for f in formats])
    mode = FakeTensorMode()
    with mode:
        inputs = [f.empty() for f in [*formats, *map(Format.of, traced.captured)]]
    run = lower(traced.graph, functional(traced.graph, mode, inputs), mode, inputs)
    return _program(traced, run, reads, lambda _, other: other == formats)


def dynamic(task: Task, reads: Reads, varying: Varying) -> Program | None:
    """Return a program for all values of some sizes.

    Args:
        task: what to compute.
        reads: what its loss reads.
        varying: which sizes vary.

    Returns:
        The program, or None where no one graph serves all sizes.
    """
    family = Sizes.of(task, varying)
    if family is None:
        return None
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    with mode:
        now = varying.of(family.formats) or ()
        inputs = family.inputs([_symbol(env, place, hint) for place, hint in enumerate(now)])
        inputs += [Format.of(x).empty() for x in family.traced.captured]
    flat = functional(family.graph, mode, inputs)
    if not _allows(env, now):
        return None
    run = lower(family.graph, flat, mode, inputs)

    def fits(other: Task, formats: Sequence[Format]) -> bool:
        sizes = family.sizes(formats)
        return sizes is not None and _allows(env, sizes) and family.holds(other, sizes)

    return _program(family.traced, run, reads, fits) if fits(task, family.formats) else None


def _program(traced: Traced, run: Run, reads: Reads, fits: Callable[[Task, Sequence[Format]], bool]) -> Program:
    places = {id(x): place for place, x in enumerate(reads.tensors)}
    captured = [places.get(id(x), x) for x in traced.captured]
    values = [(places.get(id(x), x), value) for x, value in traced.values]
    return Program(run, captured, values, traced.outline, traced.noted, fits)


def _found(x: int | Tensor, reads: Reads) -> Tensor:
    return x if isinstance(x, Tensor) else reads.tensors[x]


def _symbol(env: ShapeEnv, number: int, hint: int) -> Any:
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = symbol_source(f"size{number}")
    symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symintnode(symbol, hint=hint, source=source)


def _allows(env: ShapeEnv, sizes: Sequence[int]) -> bool:
    """Return whether what the compiler took for granted about the sizes holds for some."""
    if min(sizes) < 2 or env.replacements:
        return False
    values = dict(zip(env.backed_var_to_val, sizes, strict=False))
    conditions = [guard.expr for guard in env.guards]
    return all(bool(condition.xreplace(values)) for condition in conditions)


def _sharing(outputs: Sequence[Tensor], taken: Sequence[int]) -> list[int]:
    """Return which outputs share memory with an input, or with an output before them."""
    seen, shared = set(taken), []
    for place, x in enumerate(outputs):
        if x.numel() and memory(x) in seen:
            shared.append(place)
        seen.add(memory(x))
    return shared
