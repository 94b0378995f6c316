"""Captured graphs, with the programs that are compiled from them, and the markers that stand for their outputs."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from persample._torch import get_function_mode_stack
from persample.engines.compiled.batchable import (
    make_batchable,
    memory_of,
    name_of,
    read_inputs,
    refused_view,
    written_memory,
)
from persample.engines.compiled.trace import TraceError
from persample.inputs.modules import StandIn
from persample.utils import trees
from persample.utils.origin import OURS
from persample.utils.trees import Leaf, Tree


@dataclass(frozen=True)
class Compilation:
    """How one program was made."""

    engine: str  # "traced" or "compiled"
    reductions: tuple[str, ...]  # the names of the reductions that the program computes
    batch_size: int | None  # the number of samples, or None for any
    seconds: float
    reason: str  # what had changed since the compilation before; empty for the first with these reductions


@dataclass
class History:
    """What happened to one loss."""

    batch_sizes: set[int] = field(default_factory=set)
    compilations: list[Compilation] = field(default_factory=list)


class Capture:
    """The graph of a function, valid as long as Dynamo's guards hold.

    It goes from the tensors that the function read to those that it computed. ``reason`` is the guard that failed, so
    that the function was captured once more; empty for the first capture.
    """

    def __init__(self, graph: GraphModule, reason: str) -> None:
        self.graph = graph
        self.reason = reason
        self.programs: OrderedDict[Hashable, Any] = OrderedDict()  # what was compiled from the graph
        outputs: Tree = graph.graph.output_node().args[0]
        self.num_outputs = len(outputs)
        self.history = History()
        self.constants: list[int] = []  # inputs whose values programs contain, because an operation takes numbers only
        self.refusal: str | None = None  # why the function cannot be differentiated
        self.twin = self  # the first capture with the same graph, whose programs serve this one, too
        self._prepared = False

    @property
    def guard(self) -> str:
        """The guard that failed, without values."""
        return self.reason.partition(" == ")[0]

    def prepare(self, history: History, others: Iterable[Capture]) -> None:
        """Rewrite the graph so that torch.func can batch it, unless that is done."""
        if not self._prepared:
            sets_data = any(name_of(node) == "set_" for node in self.graph.graph.nodes)
            sets = "it gives other memory to a tensor (x.data = y)" if sets_data else None
            self.refusal = sets or refused_view(self.graph)
            make_batchable(self.graph)
            self.history = history
            codes = [x.graph.python_code("self") for x in self.graph.modules() if isinstance(x, GraphModule)]
            held = map(id, (*self.graph.parameters(), *self.graph.buffers()))
            # What is the same for graphs that compute the same.
            self.contents = get_function_mode_stack(), _settings(), [(x.src, x.globals) for x in codes], [*held]
            same = (x.twin for x in others if x.contents == self.contents)
            self.twin = next(same, self)
            self._prepared = True

    def run(self, *inputs: Leaf) -> tuple[Tensor, ...]:
        """Run the graph; an error gets an attribute ``users_line``, where it names the line that made the operation."""
        return _Naming(self.graph).run(*inputs)

    def read_values(self) -> bool:
        """Let programs contain the values that the function reads, and return whether they did not before."""
        before, self.constants = self.constants, read_inputs(self.graph.graph)
        return self.constants != before


def _settings() -> tuple[object, ...]:
    """Return the settings of torch's that a captured graph depends on."""
    return (
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda", "mps", "xpu")),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )


class _Naming(Interpreter):
    """Runs a graph, and names the user's line where it fails."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # torch's own naming would change the message

    def run_node(self, n: Node) -> object:
        """Run one node."""
        try:
            return super().run_node(n)
        except Exception as error:
            error.users_line = users_line(n.stack_trace or "")  # type: ignore[attr-defined]
            raise


class Marker(StandIn):
    """Stands for one tensor that a captured function returns; ``known`` are the outputs that no marker stands for."""

    __slots__ = ("capture", "index", "inputs", "known")

    def __init__(
        self, capture: Capture, index: int, inputs: Sequence[Leaf], known: Sequence[tuple[int, Leaf]] = ()
    ) -> None:
        self.capture = capture
        self.index = index
        self.inputs = inputs
        self.known = known

    def item(self) -> NoReturn:
        """Refuse to be read by code such as ``losses.append(loss.item())``, which Dynamo runs after the graph."""
        raise TraceError("it keeps a number that it reads: return the tensor in aux instead")

    def standing_for(self, x: object) -> object:
        """Return a marker of the same call for a known output, and anything else as it is."""
        return next((Marker(self.capture, place, self.inputs) for place, output in self.known if output is x), x)


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that a graph computes."""

    index: int  # its place among the outputs of the graph


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a captured function; after the arguments come the tensors that it closed over."""

    index: int  # its place among them


@dataclass(frozen=True, slots=True)
class Constant:
    """A value that is the same in every call, such as a size."""

    value: object


# Of an input of a graph, or of a leaf of what a captured function returns.
Origin: TypeAlias = Argument | Output | Constant


@dataclass(frozen=True)
class Captured:
    """What one call of a captured function gives."""

    capture: Capture | None  # the graph, or None if the function computes nothing from tensors
    inputs: Sequence[Leaf]  # the tensors (and sizes) that the graph takes
    leaves: list[Leaf]  # the leaves of what the function returned: markers, arguments, other tensors, constants
    structure: trees.TreeSpec
    known: frozenset[int] = frozenset()  # the outputs of the graph that depend on no argument: always values

    @classmethod
    def of(cls, returned: object) -> Captured:
        """Split what a captured function returned."""
        leaves, structure = trees.flatten(returned)
        marker = next(filter(_is_marker, leaves), None)
        if marker is None:
            return cls(None, (), leaves, structure)
        known = frozenset(place for place, _ in marker.known)
        return cls(marker.capture, marker.inputs, list(map(marker.standing_for, leaves)), structure, known)

    @property
    def num_outputs(self) -> int:
        """The number of tensors that the graph computes."""
        return self.capture.num_outputs if self.capture else 0

    @property
    def returned(self) -> set[int]:
        """The outputs that the function returned, or may keep."""
        return {x.index for x in filter(_is_marker, self.leaves)} | self.known

    @property
    def written(self) -> list[Leaf]:
        """The tensors that the graph takes and writes into."""
        graph = self.capture.graph.graph if self.capture else Graph()
        memory = (written_memory(graph) | {memory_of(node.kwargs.get("out")) for node in graph.nodes}) - {None}
        nodes = graph.find_nodes(op="placeholder")
        return [x for node, x in zip(nodes, self.inputs, strict=True) if memory_of(node) in memory]

    def origins(
        self, given: Sequence[Leaf], batched: Sequence[bool]
    ) -> tuple[tuple[Origin, ...], tuple[Origin, ...], list[Tensor]]:
        """Return where the inputs and the leaves come from."""
        known = {id(x): Argument(place) for place, x in enumerate(given) if isinstance(x, Tensor)}
        closed_over = list[Tensor]()

        def origin(x: object) -> Origin:
            if isinstance(x, Marker):
                return Output(x.index)
            if not isinstance(x, Tensor):
                return Constant(x)
            if id(x) not in known:
                known[id(x)] = Argument(len(given) + len(closed_over))
                closed_over.append(x)
            return known[id(x)]

        inputs, of_samples = list(self.inputs), {id(x) for x, split in zip(given, batched, strict=True) if split}
        for read in self.capture.constants if self.capture else ():
            if id(inputs[read]) not in of_samples:  # one value for all samples
                inputs[read] = inputs[read].item()
        return tuple(map(origin, inputs)), tuple(map(origin, self.leaves)), closed_over


def first_marker(returned: object) -> Marker | None:
    """Return a marker in what a captured function returned, or None if it computes nothing from tensors."""
    if type(returned) is Marker:  # the usual case
        return returned
    return next(filter(_is_marker, trees.flatten(returned)[0]), None)


def _is_marker(x: object) -> bool:
    return isinstance(x, Marker)


def failed_guard(reason: str) -> str:
    """Return the guard that failed, and the code that it guards."""
    first = (reason.splitlines() or [""])[0].partition(": ")[2]
    return re.sub(r"\s+", " ", first).strip()


def refusal(error: BaseException) -> str:
    """Return why Dynamo cannot capture a function, and the user's line, without its stack and its advice."""
    message = str(error)
    explanation = re.search(r"^ *Explanation: (.*)$", message, re.MULTILINE)
    said = explanation.group(1) if explanation else (message.strip() or type(error).__name__).splitlines()[0]
    return said + users_line(message)


def users_line(stack: str) -> str:
    """Return the user's last line in a stack, as the end of a message."""
    frames = re.findall(r'^ *File "(.*)", line (\d+), in (.*)\n *(.*)$', stack, re.MULTILINE)
    users = [frame for frame in frames if not frame[0].startswith(OURS)]
    if not frames:
        return ""
    path, line, name, code = (users or frames)[-1]
    return f" In {name} ({path}:{line}): `{code}`"
