"""The fast path for repeated calls: a few comparisons show that an earlier call's program serves this one, too."""

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
    """The conditions under which a call may run an earlier call's program.

    Args:
        options: the arguments that are compared by equality.
        takes: flatten params, batch, reduce and out, and compare their structure; a module must be the same object, and
            the fixed fields of reductions must be equal.
        fixed: the parameters of a module.
        numbers: the numbers and tensors in the reductions, each with the input made of it.
        captured: the program's last inputs.
        guards: torch's guards on the inputs: dtypes, shapes, strides, devices.
        read: all tensors that the loss reads, even if only their shape; each once.
        read_guards: torch's guards on ``read``. They are separate, because a tensor may be in both lists and one guard
            object takes no tensor twice.
        kind: the type of the inputs' device.
        settings: the settings of torch that the program depends on.
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
        """Return the program's inputs, or None if the call does not match.

        Args:
            params: as in ``per_sample_grads``.
            batch: as in ``per_sample_grads``.
            reduce: as in ``per_sample_grads``.
            options: the arguments that are compared by equality.
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
        for number, (value, made) in zip(numbers, self.numbers):  # noqa: B905 (equally long; strict costs time)
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
    """A call whose program later calls may run.

    Args:
        program: the program.
        reads: the objects that the loss reads.
        match: the conditions on a later call.
        result: from the program's outputs to the result of the call.
    """

    program: Program
    reads: Reads
    match: Match
    result: Callable[[Sequence[Tensor]], Any]

    def __call__(self, *call: Any) -> Any:
        """Return the result of a call, or None if it does not match this one.

        Args:
            *call: params, batch, reduce, options and out, as for ``recall``.
        """
        tensors = self.match.inputs(*call)
        if tensors is None or not self.reads.places.hold() or not self.program.holds(self.reads):
            return None
        recording = torch.is_grad_enabled()
        try:  # a signal cannot come between ``try`` or ``finally`` and a C call in its first statement
            set_grad_enabled(False)  # faster than the context no_grad
            results = self.program.outputs(tensors)
            return self.result(results) if call[-1] is None else call[-1]
        except DoubtfulError:
            return None
        finally:
            set_grad_enabled(recording)


def recall(loss_fn: Any, *call: Any) -> Any:
    """Return the result of a call by the program of an earlier one, or None if no earlier call matches.

    Args:
        loss_fn: as in ``per_sample_grads``.
        *call: params, batch, reduce, the options that are compared by equality, and out.
    """
    try:
        known = _calls.get(_name(loss_fn), ())
    except TypeError:  # not hashable
        return None
    for remembered in known:
        result = remembered(*call)  # None means no match, because no call's result is None
        if result is not None:
            return result
    return None


def remember(task: Task, program: Program, reads: Reads, call: tuple[Any, ...]) -> None:
    """Remember a call, if a few comparisons can recognize the next one like it.

    Args:
        task: the task of the call.
        program: the program that computed it.
        reads: the objects that its loss reads.
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
    """Return a taker that appends the live fields of a reduction, and requires equal class and other fields."""
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
    """Return the key of a loss: a function or method by equality (each access makes a new method), else by identity."""
    return loss_fn if isinstance(loss_fn, FunctionType | MethodType) else Held(loss_fn)


def _number(x: Any) -> Take | None:
    return any_of({int, float}) if type(x) in {int, float} else tensor(x)


def _guards(tensors: Sequence[Tensor]) -> Any:
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def _is_same(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors have the same memory and format."""
    return x.data_ptr() == y.data_ptr() and Format.of(x) == Format.of(y)


def _is_plain() -> bool:
    """Return whether no transform, inference mode or autocast surrounds the call."""
    inside = peek_interpreter_stack() is not None or torch.is_inference_mode_enabled() or torch.is_autocast_enabled()
    return not inside and not torch.is_autocast_enabled("cpu")
