"""A compiled program: its inputs, its outputs, and the conditions under which it may be used again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from persample._torch import FakeTensorMode, symbol_source
from persample.engines.compiled.lower import Run, functional, lower
from persample.engines.compiled.packing import Outline
from persample.engines.compiled.sizes import Sizes, Varying
from persample.engines.compiled.task import Task
from persample.engines.compiled.trace import Format, trace
from persample.outputs import memory

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


class DoubtfulError(ArithmeticError):
    """Raised by a program whose results are invalid: an index is out of range, or a number is too large or small."""


@dataclass
class Program:
    """Compiled code, with the conditions of its use.

    Args:
        run: the compiled code.
        constants: the tensors that tracing made, which are the last inputs of the code.
        outline: the tree of the result.
        noted: whether the last output is a flag that invalidates the others.
        fits: from a task and its formats to whether the program serves their sizes.
        batch_size: the number of samples, or None for any.
        seconds: the time that it took to compile.
    """

    run: Run
    constants: list[Tensor]
    outline: Outline
    noted: bool
    fits: Callable[[Task, Sequence[Format]], bool]
    batch_size: int | None
    seconds: float = 0.0
    _shared: list[int] | None = field(default=None)

    def __call__(self, tensors: list[Tensor]) -> Any:
        """Return the result.

        Args:
            tensors: the inputs.

        Returns:
            The result. None of its tensors shares memory with an input or with another one.

        Raises:
            DoubtfulError: if the code's flag says that its outputs are invalid.
        """
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


def static(task: Task) -> Program:
    """Return a program for the sizes of one task.

    Args:
        task: the task.
    """
    formats = [Format.of(x) for x in task.tensors]
    traced = trace(task, lambda: [f.empty() for f in formats])
    mode = FakeTensorMode()
    with mode:
        inputs = [f.empty() for f in [*formats, *map(Format.of, traced.captured)]]
    run = lower(traced.graph, functional(traced.graph, mode, inputs), mode, inputs)
    return Program(run, traced.captured, traced.outline, traced.noted, lambda _, other: other == formats, task.call.size)


def dynamic(task: Task, varying: Varying) -> Program | None:
    """Return a program for all values of some sizes.

    Args:
        task: the task.
        varying: the sizes that vary.

    Returns:
        The program, or None if no single graph serves all sizes.
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

    traced = family.traced
    made = Program(run, traced.captured, traced.outline, traced.noted, fits, None)
    return made if fits(task, family.formats) else None


def _symbol(env: ShapeEnv, number: int, hint: int) -> Any:
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = symbol_source(f"size{number}")
    symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symintnode(symbol, hint=hint, source=source)


def _allows(env: ShapeEnv, sizes: Sequence[int]) -> bool:
    """Return whether sizes satisfy the guards that the compiler placed on its symbolic sizes."""
    if min(sizes) < 2 or env.replacements:
        return False
    values = dict(zip(env.backed_var_to_val, sizes, strict=False))
    conditions = [guard.expr for guard in env.guards]
    return all(bool(condition.xreplace(values)) for condition in conditions)


def _sharing(outputs: Sequence[Tensor], taken: Sequence[int]) -> list[int]:
    """Return the positions of outputs that share memory with an input or with an earlier output."""
    seen, shared = set(taken), []
    for place, x in enumerate(outputs):
        if x.numel() and memory(x) in seen:
            shared.append(place)
        seen.add(memory(x))
    return shared
