"""Capture: Dynamo, the front end of ``torch.compile``, records the loss of one sample as a graph of torch functions.

Dynamo guards everything that the loss read: closures, globals, attributes, formats of tensors. When a guard fails, it
records anew. The backend below compiles nothing. Its graphs return markers in place of the tensors that the loss
returns, which bring out the graph, and the tensors of this call that the graph takes.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import operator
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from persample._torch import (
    capture_settings,
    context_of_a_capture,
    dynamo_settings,
    forget_captured,
    guards_to_compare,
    import_dynamo,
    recompile_reason,
    run_captured,
    set_dynamo_settings,
    tensors_read,
)
from persample.engines.compiled.batchable import CHANGES_A_NUMBER, UNREAD, split_kept
from persample.engines.compiled.graph import Capture, Captured, History, Marker, failed_guard, refusal
from persample.engines.compiled.trace import TraceError
from persample.errors import CompileLimitWarning
from persample.inputs.batch import check_kind
from persample.utils.isolation import after_imports, in_one_thread, undone
from persample.utils.origin import users_depth
from persample.utils.tracing import without_warnings
from persample.utils.trees import Tree
from persample.vmap_rules.indexing import getitem, setitem
from persample.vmap_rules.nn_functional import gaussian_nll_loss

# Dynamo tries the captures of a loss one after the other, a microsecond each.
MOST_CAPTURES = 64
# Captures that bring nothing: of the same graph, or for one value of a number that the loss itself changes.
_MOST_VAIN = 6


is_nested = operator.attrgetter("is_nested")  # then there are no strides, and comparing them ends the process


class LimitError(Exception):
    """Raised for a function that was captured too often; the eager engine computes the call."""


class NewError(Exception):
    """Raised for a function of which no capture is valid."""


class Entry:
    """The captures of one loss, or of the losses that one ``def`` or ``lambda`` makes."""

    def __init__(self, number: int) -> None:
        # Code of its own: Dynamo keeps its guards beside the code. The globals are those that it sees and adds to.
        code: CodeType = _call.__code__.replace(co_name=f"loss_{number}")
        function = FunctionType(code, {"__builtins__": builtins, "torch": torch, "NewError": NewError})
        weakref.finalize(self, forget_captured, code).atexit = False
        self._run = run_captured(function)  # without capturing, where no guards hold
        import_dynamo()
        self._read: dict[str, CodeType] = {}  # for each capture: closures, globals, what modules hold
        self._globals = {"G": function.__globals__}
        options: dict[str, str | int | bool | Callable[..., object]] = {
            "guard_filter_fn": functools.partial(_compared, self._read)
        }
        self._compiled = torch.compile(function, backend=_backend, fullgraph=True, options=options)
        self.captures: WeakSet[Capture] = WeakSet()  # those that are alive
        self.calls: list[Any] = []  # the latest ones, for ``earlier_calls.py``
        self.changes_modules = False  # whether a capture leaves tensors in modules
        self.history = History()
        self._vain = 0
        self._has_warned = False
        self._unread: type[_Unread] | None = None  # the mode is traced with the loss, which takes longer

    @in_one_thread
    def find(self, function: Callable[..., object], *args: object) -> object:
        """Return what the function returns, with markers, by the capture whose guards hold; ``NewError`` if none do."""
        for code in self._read.values():
            with suppress(AttributeError, LookupError, NameError, TypeError):  # the capture is not of this call
                read = eval(code, self._globals, {"function": function, "args": args})
                if any(map(is_nested, read)):
                    check_kind("a tensor that loss_fn reads", next(filter(is_nested, read)))
        return self._run(function, args, self._unread)

    @in_one_thread
    def capture(self, function: Callable[..., object], *args: object) -> Captured:
        """Return the capture of a function, recorded now if no other is valid."""
        try:
            return self._prepared(Captured.of(self.find(function, *args)))
        except NewError:
            pass
        if len(self.captures) >= MOST_CAPTURES or self._vain >= _MOST_VAIN:
            guard, count = Counter(made.guard for made in self.captures).most_common(1)[0]
            if not self._has_warned:
                warnings.warn(
                    f"Traced and compiled calls of loss_fn are answered eagerly: it was captured {len(self.captures)} "
                    f"times, {count} of them because this no longer held: {guard}. Pass what changes in batch "
                    "(unbatched, None in in_dims) or as a tensor; when it no longer changes, call clear_cache().",
                    CompileLimitWarning,
                    stacklevel=users_depth(),
                )
            self._has_warned = True
            raise LimitError
        try:
            captured = after_imports(lambda: context_of_a_capture().run(self._record, function, args))
        except NewError as error:
            for key in [key for key, known in _entries.items() if known is self]:  # torch has marked its code
                del _entries[key]
            raise TraceError(
                "torch.compile does not run here: it is disabled, or a TorchDispatchMode is active"
            ) from error
        except (RuntimeError, AssertionError, TypeError) as error:  # Dynamo asserts; a marker is no gradient
            if self._unread is None and any(said in str(error) for said in _READS):
                torch.compiler.allow_in_graph(list(UNREAD))
                self._unread = _Unread
                # Who marks a tensor to differentiate by it is told that, and not what stops the second attempt.
                with suppress(TraceError) if _MARKS in str(error) else nullcontext():
                    return self.capture(function, *args)
                self._unread = None
            raise TraceError(refusal(error)) from error
        return self._prepared(captured)

    def _prepared(self, captured: Captured) -> Captured:
        if captured.capture is not None:  # not in the backend, where torch traces; an interrupt may have come between
            captured.capture.prepare(self.history, self.captures)
            self._vain += captured.capture not in self.captures and captured.capture.twin is not captured.capture
            self.captures.add(captured.capture)
            if captured.capture.refusal is not None:
                raise TraceError(captured.capture.refusal)
            return replace(captured, capture=captured.capture.twin)
        return captured

    def _record(
        self, function: Callable[..., object], args: Sequence[object], *, numbers_are_constants: bool = False
    ) -> Captured:
        def recorded() -> Captured:
            with capture_settings(numbers_are_constants=numbers_are_constants), without_warnings():
                return Captured.of(self._compiled(function, args, self._unread))

        before = dynamo_settings()
        try:
            return undone(recorded, lambda: set_dynamo_settings(before))  # also after a signal
        except RuntimeError as error:
            if numbers_are_constants or not self.captures:
                raise
            self._vain += CHANGES_A_NUMBER in str(error)
        # Dynamo makes a number that has changed an input, which math.isnan, range() and str() do not take.
        return self._record(function, args, numbers_are_constants=True)


def entry_of(function: Callable[..., object]) -> Entry:
    """Return the captures of a function; lambdas made anew share their code, and so their captures."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    key = getattr(function, "__code__", type(function))
    entry = _entries.get(key)
    return _new_entry(key) if entry is None else entry


@in_one_thread
def _new_entry(key: object) -> Entry:
    return after_imports(lambda: _entries.setdefault(key, Entry(next(_numbers))))


@in_one_thread
def forget() -> None:
    """Drop all captures, with Dynamo's guards."""
    for entry in _entries.values():
        entry.calls = []
        for capture in entry.captures:
            capture.programs.clear()  # torch keeps the graphs of the latest losses alive
    _entries.clear()


_entries: WeakKeyDictionary[object, Entry] = WeakKeyDictionary()
_numbers = itertools.count()


# What Dynamo says of a value that it would read; the last one since torch 2.15.
_MARKS = "requires_grad_()"
_READS = ("specialized integer", "data-dependent", "Pending unbacked symbols", _MARKS)


_RULES: dict[object, Callable[..., Tree]] = {
    Tensor.__getitem__: getitem,
    Tensor.__setitem__: setitem,
    F.gaussian_nll_loss: gaussian_nll_loss,
}


class _Unread(TorchFunctionMode):
    """Lets a loss do what Dynamo refuses because torch would read a value, which the result does not need.

    It may index with 0-d tensors, as in ``log_probs[t, action[t]]``, also to write, and call ``F.gaussian_nll_loss``,
    which checks the sign of variances.
    """

    def __torch_function__(
        self, func: Callable[..., Tree], types: object, args: Tree = (), kwargs: Tree = None
    ) -> Tree:
        """Call a function of torch."""
        if func is Tensor.requires_grad_ and not (args[1:] or kwargs) and args[0].requires_grad:
            return args[0]  # by hooks of transformers
        return _RULES.get(func, func)(*args, **(kwargs or {}))


def _call(function: Callable[..., object], args: Sequence[object], unread: type[_Unread] | None) -> object:
    if not torch.compiler.is_compiling():
        raise NewError  # Python runs this only if no capture is valid
    if unread is None:
        return function(*args)
    with unread():
        return function(*args)


def _compared(read: dict[str, CodeType], guards: Sequence[object]) -> list[bool]:
    if source := tensors_read(guards):
        read[source] = compile(source, source, "eval")
    return guards_to_compare(guards)


def _backend(graph: GraphModule, _examples: object) -> Callable[..., list[object]]:
    split = split_kept(graph)
    made = Capture(graph if split is None else split.graph, failed_guard(recompile_reason()))
    if split is None:  # the usual case
        places = range(made.num_outputs)
        return lambda *inputs: [Marker(made, place, inputs) for place in places]

    def returned(*inputs: object) -> list[object]:
        values = dict(zip(split.kept, split.compute(*inputs), strict=True))
        read = [inputs[place] for place in split.used]
        known = [(place, values[n]) for n, place in split.outputs.items() if n in values]
        rest = {n: Marker(made, place, read, known) for n, place in split.outputs.items() if n not in values}
        return [x for _, x in sorted({**values, **rest}.items())]

    return returned
