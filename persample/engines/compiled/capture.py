"""Capture: Dynamo, the front end of ``torch.compile``, records the loss of one sample as a graph of torch functions.

Dynamo guards everything that the loss read: closures, globals, attributes, formats of tensors. When a guard fails, it
records anew. The backend below compiles nothing. Its graphs return markers in place of the tensors that the loss
returns, which bring out the graph, and the tensors of this call that the graph takes.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.overrides import TorchFunctionMode

from persample._torch import capture_settings, recompile_reason, run_captured
from persample.engines.compiled.batchable import make_batchable, read_inputs
from persample.errors import TorchVersionError
from persample.inputs.modules import StandIn
from persample.utils import trees
from persample.utils.tracing import without_warnings
from persample.vmap_rules.indexing import getitem_unread

# Dynamo tries the captures of a loss one after the other, a microsecond each.
MOST_CAPTURES = 64


class UncapturableError(Exception):
    """Raised for a function that Dynamo cannot capture as one graph; the message is the reason."""


class NewError(Exception):
    """Raised for a function of which no capture is valid."""


@dataclass(frozen=True)
class Compilation:
    """The compilation of one program.

    Args:
        reductions: the names of the reductions that the program computes.
        batch_size: the number of samples, or None for any.
        seconds: the time that it took.
        reason: what had changed since the compilation before; empty for the first with these reductions.
    """

    reductions: tuple[str, ...]
    batch_size: int | None
    seconds: float
    reason: str


@dataclass
class History:
    """What happened to one loss.

    Args:
        batch_sizes: the sizes of its batches.
        compilations: the compilations of its programs.
    """

    batch_sizes: set[int] = field(default_factory=set)
    compilations: list[Compilation] = field(default_factory=list)


class Capture:
    """The graph of a function, valid as long as Dynamo's guards hold.

    Args:
        graph: from any tensor of the sample, and the tensors that the function read, to those that it computed.
        reason: the guard that failed, so that the function was captured once more; empty for the first capture.

    Attributes:
        programs: what was compiled from the graph.
        history: what happened to the function.
        constants: the inputs of the graph whose values programs contain, because an operation takes numbers only.
    """

    def __init__(self, graph: GraphModule, reason: str) -> None:
        self.graph = graph
        self.reason = reason
        self.programs: OrderedDict[Hashable, Any] = OrderedDict()
        outputs: Any = graph.graph.output_node().args[0]
        self.num_outputs = len(outputs)
        self.history = History()
        self.constants: list[int] = []

    @property
    def guard(self) -> str:
        """The guard that failed, without values."""
        return self.reason.partition(" == ")[0]

    def prepare(self, history: History) -> None:
        """Rewrite the graph so that torch.func can batch it.

        Args:
            history: what happened to the function.
        """
        make_batchable(self.graph)
        self.history = history

    def run(self, *inputs: Any) -> Any:
        """Run the graph; an error gets an attribute ``users_line``, where it names the line that made the operation."""
        return _Naming(self.graph).run(*inputs)

    def read_values(self) -> bool:
        """Let programs contain the values that the function reads, and return whether they did not before."""
        before, self.constants = self.constants, read_inputs(self.graph.graph)
        return self.constants != before


class _Naming(Interpreter):
    """Runs a graph, and names the user's line where it fails."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # torch's own naming would change the message

    def run_node(self, n: Node) -> Any:
        """Run one node.

        Args:
            n: the node.
        """
        try:
            return super().run_node(n)
        except Exception as error:
            error.users_line = _line(n.stack_trace or "")  # type: ignore[attr-defined]
            raise


class Marker(StandIn):
    """Stands for one tensor that a captured function returns.

    Args:
        capture: the graph.
        index: the place among the graph's outputs.
        inputs: the graph's inputs in this call.
    """

    __slots__ = ("capture", "index", "inputs")

    def __init__(self, capture: Capture, index: int, inputs: tuple[Any, ...]) -> None:
        self.capture = capture
        self.index = index
        self.inputs = inputs


@dataclass(frozen=True, slots=True)
class Output:
    """The place of a tensor among the outputs of a graph.

    Args:
        index: the place.
    """

    index: int


@dataclass(frozen=True)
class Captured:
    """What one call of a captured function gives.

    Args:
        capture: the graph, or None if the function computes nothing from tensors.
        inputs: the tensors (and sizes) that the graph takes.
        leaves: the leaves of what the function returned: markers, arguments, other tensors, constants.
        structure: their structure.
    """

    capture: Capture | None
    inputs: tuple[Any, ...]
    leaves: list[Any]
    structure: trees.TreeSpec

    @classmethod
    def of(cls, returned: Any) -> Captured:
        """Split what a captured function returned."""
        leaves, structure = trees.flatten(returned)
        marker = first_marker(returned)
        if marker is None:
            return cls(None, (), leaves, structure)
        return cls(marker.capture, marker.inputs, leaves, structure)

    @property
    def num_outputs(self) -> int:
        """The number of tensors that the graph computes."""
        return self.capture.num_outputs if self.capture else 0

    @property
    def returned(self) -> set[int]:
        """The outputs that the function returned."""
        return {x.index for x in self.leaves if isinstance(x, Marker)}

    def places(
        self, given: Sequence[Any], batched: Sequence[bool]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], list[Tensor]]:
        """Tell the arguments among the inputs and the leaves from the tensors that the function closed over.

        Args:
            given: the arguments, flattened.
            batched: for each argument, whether it differs from sample to sample.

        Returns:
            For each input, and for each leaf, its place among the arguments and the tensors closed over; or an output;
            or a constant in a tuple. And the tensors closed over.
        """
        known = {id(x): place for place, x in enumerate(given) if isinstance(x, Tensor)}
        closed_over = list[Tensor]()

        def place(x: Any) -> Any:
            if isinstance(x, Marker):
                return Output(x.index)
            if not isinstance(x, Tensor):
                return (x,)
            found = known.get(id(x))
            if found is None:
                found = known[id(x)] = len(given) + len(closed_over)
                closed_over.append(x)
            return found

        inputs, of_samples = list(self.inputs), {id(x) for x, split in zip(given, batched, strict=True) if split}
        for read in self.capture.constants if self.capture else ():
            if id(inputs[read]) not in of_samples:  # one value for all samples
                inputs[read] = inputs[read].item()
        return tuple(map(place, inputs)), tuple(map(place, self.leaves)), closed_over


def first_marker(returned: Any) -> Marker | None:
    """Return a marker in what a captured function returned, or None if it computes nothing from tensors."""
    if type(returned) is Marker:  # the usual case
        return returned
    return next((leaf for leaf in trees.flatten(returned)[0] if isinstance(leaf, Marker)), None)


class Entry:
    """The captures of one loss, or of the losses that one ``def`` or ``lambda`` makes.

    Attributes:
        captures: the captures that are alive.
        calls: the latest calls, whose programs serve later calls like them; for ``repeated.py``.
        history: what happened to them.
    """

    def __init__(self, number: int) -> None:
        # Code of its own: Dynamo keeps its guards beside the code. The globals are those that it sees and adds to.
        code: CodeType = _call.__code__.replace(co_name=f"loss_{number}")
        function = FunctionType(code, {"__builtins__": builtins, "torch": torch, "NewError": NewError})
        self._run = run_captured(function)  # without capturing, where no guards hold
        compiler: Any = torch.compile  # torch's types do not have recompile_limit
        self._compiled = compiler(function, backend=_backend, fullgraph=True, recompile_limit=2 * MOST_CAPTURES)
        self.captures: WeakSet[Capture] = WeakSet()
        self.calls: list[Any] = []
        self.history = History()
        self._unread: type[_UnreadIndices] | None = None  # the mode is traced with the loss, which takes longer

    def find(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what the function returns, with markers, by the capture whose guards hold.

        Args:
            function: the function.
            *args: its arguments.

        Raises:
            NewError: if there is none.
        """
        return self._run(function, args, self._unread)

    def capture(self, function: Callable[..., Any], *args: Any) -> Captured:
        """Return the capture of a function, recorded now if no other is valid.

        Args:
            function: the function.
            *args: its arguments.

        Raises:
            UncapturableError: if the function cannot be captured as one graph.
        """
        try:
            return Captured.of(self.find(function, *args))
        except NewError:
            pass
        if len(self.captures) >= MOST_CAPTURES:
            guard, count = Counter(made.guard for made in self.captures if made.reason).most_common(1)[0]
            raise UncapturableError(
                f"it was captured {MOST_CAPTURES} times, {count} of them because this no longer held: {guard}. Pass "
                "what changes in batch (unbatched, None in in_dims) or as a tensor, or call persample.clear_cache()"
            )
        try:
            captured = self._record(function, args)
        except TorchVersionError:
            raise
        except (RuntimeError, AssertionError) as error:  # Dynamo asserts what it expects of the function
            if self._unread is None and "specialized integer" in str(error):
                self._unread = _UnreadIndices
                return self.capture(function, *args)
            raise UncapturableError(_reason(error)) from error
        if captured.capture is not None:
            captured.capture.prepare(self.history)  # not in the backend, where torch traces
            self.captures.add(captured.capture)
        return captured

    def _record(
        self, function: Callable[..., Any], args: Sequence[Any], *, numbers_are_constants: bool = False
    ) -> Captured:
        try:
            with capture_settings(numbers_are_constants=numbers_are_constants), without_warnings():
                return Captured.of(self._compiled(function, args, self._unread))
        except RuntimeError:
            if numbers_are_constants or not self.captures:
                raise
        # Dynamo makes a number that has changed an input, which math.isnan, range() and str() do not take.
        return self._record(function, args, numbers_are_constants=True)


def entry_of(function: Any) -> Entry:
    """Return the captures of a function; lambdas made anew share their code, and so their captures.

    Args:
        function: any callable.
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    key = getattr(function, "__code__", type(function))
    entry = _entries.get(key)
    if entry is None:
        with _lock:
            entry = _entries.setdefault(key, Entry(next(_numbers)))
    return entry


def entries() -> list[Entry]:
    """Return all entries."""
    return list(_entries.values())


def forget() -> None:
    """Drop all captures, with Dynamo's guards."""
    with _lock:
        for entry in _entries.values():
            entry.calls = []
            for capture in entry.captures:
                capture.programs.clear()  # torch keeps the graphs of the latest losses alive
        _entries.clear()


_TORCH = str(Path(torch.__file__).parent)
_entries: WeakKeyDictionary[Any, Entry] = WeakKeyDictionary()
_numbers = itertools.count()
_lock = threading.Lock()


class _UnreadIndices(TorchFunctionMode):
    """Lets a loss index with 0-d tensors that it computed, as in ``log_probs[t, action[t]]``: Dynamo refuses these."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch.

        Args:
            func: the function.
            types: the tensor subclasses among the arguments.
            args: the arguments.
            kwargs: the keyword arguments.

        Returns:
            The result of the function.
        """
        if func is Tensor.__getitem__:
            x, index = args
            return getitem_unread(x, index, lambda _: True)
        return func(*args, **(kwargs or {}))


def _call(function: Callable[..., Any], args: Sequence[Any], unread: Any) -> Any:
    if not torch.compiler.is_compiling():
        raise NewError  # Python runs this only if no capture is valid
    if unread is None:
        return function(*args)
    with unread():
        return function(*args)


def _backend(graph: GraphModule, _examples: Any) -> Callable[..., list[Marker]]:
    made = Capture(graph, _guard(recompile_reason()))
    places = range(made.num_outputs)
    return lambda *inputs: [Marker(made, place, inputs) for place in places]


def _guard(reason: str) -> str:
    """Return the guard that Dynamo says failed, and the code that it guards."""
    first = (reason.splitlines() or [""])[0].partition(": ")[2]
    return re.sub(r"\s+", " ", first).strip()


def _reason(error: BaseException) -> str:
    """Return Dynamo's reason and the user's line, without its stack and its advice for the developers of torch."""
    message = str(error)
    explanation = re.search(r"^ *Explanation: (.*)$", message, re.MULTILINE)
    said = explanation.group(1) if explanation else (message.strip() or type(error).__name__).splitlines()[0]
    return said + _line(message)


def _line(stack: str) -> str:
    """Return the last line of a stack of torch's, as the end of a message."""
    frames = re.findall(r'^ *File "(.*)", line (\d+), in (.*)\n *(.*)$', stack, re.MULTILINE)
    users = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    if not frames:
        return ""
    path, line, name, code = (users or frames)[-1]
    return f" In {name} ({path}:{line}): `{code}`"
