"""Capture: Dynamo, the front end of ``torch.compile``, records the loss of one sample as a graph of torch functions.

Dynamo guards everything that the loss read (closures, globals, attributes, formats of tensors) and calls the backend
below again when a guard fails. The backend compiles nothing. Its graphs return markers, which come back in place of the
tensors that the loss returns: they bring the graph, and the tensors of this call that the graph takes.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import re
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.fx import GraphModule

from persample._torch import DynamoError, RecompileLimitError, are_capture_settings, capture_settings, recompile_reason
from persample.engines.compiled.batchable import make_batchable
from persample.inputs.modules import StandIn
from persample.utils import trees

# Dynamo searches the captures of a loss one after the other, a microsecond each.
MOST_CAPTURES = 64
_lock = threading.Lock()


class UncapturableError(Exception):
    """Raised for a function that Dynamo cannot capture as one graph; the message is the reason."""


class Capture:
    """The graph of a function, valid as long as Dynamo's guards hold.

    Args:
        graph: from the tensors that the function read to the tensors that it computed.
        reason: the guard that failed, so that the function was captured once more; empty for the first capture.
    """

    def __init__(self, graph: GraphModule, reason: str) -> None:
        self.reason = reason
        self.programs: dict[Hashable, Any] = {}  # compiled from the graph; they live as long as it is valid
        self.num_outputs = len(graph.graph.output_node().args[0])
        self._dynamos = graph

    @functools.cached_property
    def run(self) -> GraphModule:
        """The graph in a form that torch.func can batch; its first input is any tensor of the sample."""
        make_batchable(self._dynamos)
        return self._dynamos


@dataclass(frozen=True, slots=True)
class Marker(StandIn):
    """Stands for one tensor that a captured function returns.

    Args:
        capture: the graph.
        index: the place among the graph's outputs.
        inputs: the graph's inputs in this call.
    """

    capture: Capture = field(repr=False)
    index: int
    inputs: tuple[Any, ...] = field(repr=False)


@dataclass(frozen=True)
class Captured:
    """What one call of a captured function gives.

    Args:
        capture: the graph, or None if the function computes nothing from tensors.
        inputs: the tensors (and sizes) that the graph takes.
        returned: what the function returned, with markers for the tensors that it computed.
    """

    capture: Capture | None
    inputs: tuple[Any, ...]
    returned: Any


def capture(function: Callable[..., Any], *args: Any) -> Captured:
    """Call a function by Dynamo.

    Args:
        function: the function.
        *args: its arguments.

    Raises:
        UncapturableError: if the function cannot be captured as one graph.
    """
    entry = _compiled(function)
    with torch.enable_grad():
        try:
            returned = entry(function, args)
        except (DynamoError, RecompileLimitError):
            try:
                with capture_settings():
                    returned = entry(function, args)
            except (DynamoError, RecompileLimitError) as error:
                raise UncapturableError(_reason(error)) from error
    leaves, _ = trees.flatten(returned)
    marker = next((leaf for leaf in leaves if isinstance(leaf, Marker)), None)
    return Captured(marker and marker.capture, marker.inputs if marker else (), returned)


def captures() -> list[Capture]:
    """Return all captures that are alive."""
    return list(_captures)


def forget() -> None:
    """Drop all captures with Dynamo's guards."""
    with _lock:
        _entries.clear()
        _captures.clear()


_captures: WeakSet[Capture] = WeakSet()
_entries: WeakKeyDictionary[Any, Callable[..., Any]] = WeakKeyDictionary()
_numbers = itertools.count()


class _NewError(Exception):
    """Raised to capture a function once more, under the settings that a capture needs: these take time to set."""


def _backend(graph: GraphModule, _examples: Any) -> Callable[..., list[Marker]]:
    if not are_capture_settings():
        raise _NewError
    made = Capture(graph, recompile_reason())
    _captures.add(made)
    places = range(made.num_outputs)
    return lambda *inputs: [Marker(made, place, inputs) for place in places]


def _call(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    return function(*args)


def _compiled(function: Any) -> Callable[..., Any]:
    """Return ``_call``, compiled apart for each loss, so that the guards of other losses are not searched.

    Lambdas made anew share their code, and so their captures.
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    key = getattr(function, "__code__", type(function))
    entry = _entries.get(key)
    if entry is None:
        with _lock:
            code: CodeType = _call.__code__.replace(co_name=f"loss_{next(_numbers)}")
            entry = torch.compile(
                FunctionType(code, {"__builtins__": builtins}), backend=_backend, fullgraph=True, recompile_limit=MOST_CAPTURES
            )
            _entries[key] = entry
    return entry


def _reason(error: BaseException) -> str:
    """Return Dynamo's reason and the user's line: its message has the whole stack, and advice for developers of torch."""
    message = str(error)
    explanation = re.search(r"^ *Explanation: (.*)$", message, re.MULTILINE)
    said = explanation.group(1) if explanation else (message.strip() or type(error).__name__).splitlines()[0]
    frames = re.findall(r'^ *File "(.*)", line (\d+), in (.*)\n *(.*)$', message, re.MULTILINE)
    if not frames:
        return said
    path, line, name, code = frames[-1]
    return f"{said} In {name} ({path}:{line}): `{code}`"
