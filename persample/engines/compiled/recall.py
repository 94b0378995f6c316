"""Calls like one before: the program is run at once, after the few comparisons that show that it is the right one."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from persample._torch import TensorGuards, peek_interpreter_stack, set_grad_enabled
from persample.engines.compiled.cache import on_clear
from persample.engines.compiled.matching import Take, any_of, equal, maker, taker, tensor
from persample.engines.compiled.program import DoubtfulError, Program
from persample.engines.compiled.reads import Held, Reads
from persample.engines.compiled.state import settings
from persample.engines.compiled.task import Task, as_input
from persample.engines.compiled.trace import Format
from persample.inputs.hooks import is_hooked
from persample.outputs import is_apart
from persample.reductions import Reduction
from persample.utils import trees

_MOST = 64
_MOST_OF_ONE = 4
_calls: OrderedDict[Any, list[Recalled]] = OrderedDict()
on_clear(_calls.clear)


@dataclass
class Match:
    """What a call must be like.

    Args:
        options: the arguments that are compared as they are.
        takes: take params apart (a module must be the same one), batch, reduce (comparing what is fixed), and out.
        fixed: the parameters of a module.
        numbers: numbers and tensors in the reductions, and what was made of them.
        captured: the program's last inputs.
        guards: what torch checks of the inputs: dtypes, shapes, strides, devices.
        read: all tensors that the loss reads, if only their shape, each once.
        read_guards: the same of these; apart, for an input may be among them, and guards take none twice.
        kind: of the inputs' device.
        settings: those of torch.
    """

    options: tuple[Any, ...]
    takes: tuple[Take, Take, Take, Take]
    fixed: list[Tensor]
    numbers: list[tuple[Any, Tensor]]
    captured: list[Tensor]
    guards: Any
    read: list[Tensor]
    read_guards: Any
    kind: str
    settings: Any

    def inputs(self, params: Any, batch: Any, reduce: Any, options: Any, out: Any) -> list[Tensor] | None:
        """Return the program's inputs, or None if the call is another one.

        Args:
            params: as in ``per_sample_grads``.
            batch: the same.
            reduce: the same.
            options: the arguments that are compared as they are.
            out: as in ``per_sample_grads``.
        """
        tensors, numbers = [*self.fixed], list[Any]()
        take_params, take_batch, take_reduce, take_out = self.takes
        if options != self.options or not take_params(params, tensors) or any(map(is_hooked, tensors)):
            return None
        if not take_batch(batch, tensors):
            return None
        if not take_reduce(reduce, numbers):
            return None
        for number, (value, made) in zip(numbers, self.numbers):  # noqa: B905 (as many, and in a hurry)
            known = number is value and not isinstance(value, Tensor)
            tensors.append(made if known else as_input(number, made.device))
        if out is not None and not is_apart(out, [*tensors, *self.captured]):
            return None
        if not take_out(out, tensors):
            return None
        alike = self.guards.check(*tensors) and self.read_guards.check(*self.read)
        alike = alike and settings(self.kind) == self.settings and _is_plain()
        return [*tensors, *self.captured] if alike else None


@dataclass
class Recalled:
    """A call that may come again.

    Args:
        program: its program.
        reads: what its loss reads.
        match: what the call must be like.
        result: makes the result of the program's outputs.
    """

    program: Program
    reads: Reads
    match: Match
    result: Callable[[Sequence[Tensor]], Any]

    def __call__(self, *call: Any) -> Any:
        """Return the result of a call, or None if it is not like this one.

        Args:
            *call: params, batch, reduce, options and out, as for ``recall``.
        """
        tensors = self.match.inputs(*call)
        if tensors is None or not self.reads.places.hold() or not self.program.holds(self.reads):
            return None
        recording = torch.is_grad_enabled()
        try:  # no signal comes between a statement of ``try`` or ``finally`` and one call of C that it starts with
            set_grad_enabled(False)  # as no_grad does, without a context
            results = self.program.outputs(tensors)
            return self.result(results) if call[-1] is None else call[-1]
        except DoubtfulError:
            return None
        finally:
            set_grad_enabled(recording)


def recall(loss_fn: Any, *call: Any) -> Any:
    """Return the result of a call like one before, or None if it is not known to be one.

    Args:
        loss_fn: as in ``per_sample_grads``.
        *call: params, batch, reduce, the options that are compared as they are, and out.
    """
    try:
        known = _calls.get(_name(loss_fn), ())
    except TypeError:  # not hashable
        return None
    for remembered in known:
        result = remembered(*call)  # no result is None: there is always something asked for
        if result is not None:
            return result
    return None


def remember(task: Task, program: Program, reads: Reads, call: tuple[Any, ...]) -> None:
    """Remember a call, if the next one like it can be told by a few comparisons.

    Args:
        task: what was computed.
        program: by which program.
        reads: what its loss reads.
        call: loss_fn, params, batch, reduce, options and out, as for ``recall``.
    """
    loss_fn, params, batch, reduce, options, out = call
    is_module = isinstance(params, nn.Module)
    fixed = [p for p in params.parameters() if p.requires_grad] if is_module else []
    apart = equal(params) if is_module else taker(params, tensor)
    takes: list[Any] = [apart, taker(batch, tensor), taker(reduce, _reduction), taker(out, tensor)]
    given, found, written = [*fixed], list[Any](), list[Any]()
    parts = zip(takes, (params, batch, reduce, out), (given, given, found, written), strict=True)
    if not all(take and take(tree, leaves) for take, tree, leaves in parts):
        return
    mine, kind = task.tensors, task.call.params[0].device.type
    written = written if task.out is not None else []
    alike = len(given) + len(found) + len(written) == len(mine) and all(map(_is_same, given, mine))
    if not _is_plain() or not alike or (task.out is None) != (out is None):
        return
    captured, numbers = program.inputs(reads), list(zip(found, mine[len(given) :], strict=False))
    guards = _guards([*given, *(made for _, made in numbers), *written])
    read = list({id(x): x for x in [*reads.tensors, *captured]}.values())
    result = maker(trees.unflatten(program.outline, trees.structure(reduce))) if out is None else tuple
    compared = guards, read, _guards(read), kind, settings(kind)
    match = Match(copy.deepcopy(options), (*takes,), fixed, numbers, captured, *compared)
    try:
        known = _calls.pop(_name(loss_fn), [])
    except TypeError:
        return
    _calls[_name(loss_fn)] = [Recalled(program, reads, match, result), *known][:_MOST_OF_ONE]
    for name in list(_calls)[:-_MOST]:
        _calls.pop(name, None)


def _reduction(x: Any) -> Take | None:
    """Return a taker of the live fields of a reduction of the same class, and equal in what else it says."""
    if not isinstance(x, Reduction):
        return equal(x)
    kind, live = type(x), x.live
    fixed = [(name, equal(value)) for name, value in vars(x).items() if name not in live]
    fixed += [("needs_more_than", equal(x.needs_more_than))]
    fields = [(name, taker(getattr(x, name), _number)) for name in live]
    if any(take is None for _, take in fields):
        return None
    parts: list[tuple[str, Any]] = [*fixed, *fields]

    def take(y: Any, numbers: list[Any]) -> bool:
        if type(y) is not kind:
            return False
        return all(part(getattr(y, name), numbers) for name, part in parts)

    return take


def _name(loss_fn: Any) -> Any:
    """Return what calls of a loss are found by: itself, whatever it says it equals; a method is made anew each time."""
    return loss_fn if isinstance(loss_fn, FunctionType | MethodType) else Held(loss_fn)


def _number(x: Any) -> Take | None:
    return any_of({int, float}) if type(x) in {int, float} else tensor(x)


def _guards(tensors: Sequence[Tensor]) -> Any:
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def _is_same(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are the same to a program."""
    return x.data_ptr() == y.data_ptr() and Format.of(x) == Format.of(y)


def _is_plain() -> bool:
    """Return whether nothing is around that a program would have to be run differently for."""
    inside = peek_interpreter_stack() is not None or torch.is_inference_mode_enabled() or torch.is_autocast_enabled()
    return not inside and not torch.is_autocast_enabled("cpu")
