"""Tracing: a function of tensors becomes one flat graph of aten operations, and trees become flat lists of tensors."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from persample._torch import OpOverload, force_original_view_tracking, schema
from persample.engines.compiled.bounds import Bounds
from persample.engines.compiled.straight import simplify, writes
from persample.errors import LossError, TorchVersionError
from persample.utils import trees
from persample.utils.numerics import is_folded
from persample.utils.origin import is_users
from persample.utils.tracing import Trace, any_exception, without_warnings
from persample.utils.trees import Tree


@dataclass(frozen=True)
class Made:
    """A dataclass instance (a mergeable leaf or a factor) without its tensors."""

    kind: type
    parts: tuple[tuple[str, object], ...]  # the names and values of its fields


@dataclass(frozen=True)
class Outline:
    """A tree without its tensors."""

    leaves: tuple[object, ...]  # dataclass instances without tensors, constants, and the class ``Tensor`` for a tensor
    structure: trees.TreeSpec

    def filled(self, tensors: Sequence[Tensor]) -> Tree:
        """Return the tree with tensors in their places, in the order of ``pack``."""
        rest = iter(tensors)
        return trees.unflatten([_filled(x, rest) for x in self.leaves], self.structure)


# A nested function that calls itself would keep the tensors in a cycle, until Python collects garbage.
def _filled(x: object, rest: Iterator[Tensor]) -> object:
    if x is Tensor:
        return next(rest)
    if isinstance(x, Made):
        return x.kind(**{name: _filled(part, rest) for name, part in x.parts})
    return tuple(_filled(part, rest) for part in x) if type(x) is tuple else x


def pack(tree: object) -> tuple[list[Tensor], Outline]:
    """Split a pytree of tensors, and of dataclasses that hold tensors, into its tensors and its outline."""
    tensors: list[Tensor] = []
    leaves, structure = trees.flatten(tree)
    return tensors, Outline(tuple(_taken(x, tensors) for x in leaves), structure)


def _taken(x: object, tensors: list[Tensor]) -> object:
    if isinstance(x, Tensor):
        tensors.append(x)
        return Tensor
    if type(x) is tuple:
        return tuple(_taken(part, tensors) for part in x)
    if is_dataclass(x) and not isinstance(x, type):
        return Made(type(x), tuple((field.name, _taken(getattr(x, field.name), tensors)) for field in fields(x)))
    return x


class TraceError(Exception):
    """Raised for a loss that Dynamo cannot capture as one graph, or torch cannot trace; the message is the reason."""


# torch's warning where vmap runs an operation once for each sample.
_LOOPS = "There is a performance drop because we have not yet implemented the batching rule"


Size: TypeAlias = int | torch.SymInt  # the latter where a program is made for any number of samples


class Format(NamedTuple):
    """The properties of an input tensor that a program depends on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> Format:
        """Return the format of a tensor."""
        return cls(tuple(x.shape), x.stride(), x.dtype, x.device)

    def empty(self, shape: Sequence[Size] | None = None, stride: Sequence[Size] | None = None) -> Tensor:
        """Return an uninitialized tensor of this format, or of another shape."""
        sizes, steps = shape or self.shape, stride or self.stride
        return torch.empty_strided(sizes, steps, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Traced:
    """A function as a graph."""

    graph: GraphModule  # from inputs and captured tensors to the results, and perhaps a flag that invalidates these
    captured: list[Tensor]  # the tensors that tracing made, which are constants of the graph
    outline: Outline  # the tree of the result
    noted: bool  # whether the last output is the flag
    written: int = 0  # the largest number of gradient elements written out at a time, for graphs of any batch size


def trace(
    function: Callable[[list[Tensor]], object],
    inputs: Callable[[], list[Tensor]],
    *,
    any_size: bool = False,
    compiles: bool = True,
) -> Traced:
    """Trace a function of tensors to a tree of tensors and of dataclasses that hold tensors, or raise ``TraceError``.

    ``inputs`` makes the fake tensors that it is traced with. If the graph will serve ``any_size``, an operation that
    vmap runs once for each sample is an error: the graph would grow with their number. Unless it ``compiles``, the
    graph is simplified, and runs operation by operation.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # importing it takes half a second

    outline, noted, handled = Outline((), trees.structure([])), False, sys.exc_info()[1]
    state = Trace(any_size, compiles)

    def flat(*tensors: Tensor) -> list[Tensor]:
        nonlocal outline, noted
        with Bounds(state.exceptions, clamps=compiles):
            results, outline = pack(function(list(tensors)))
            results = [x.clone(memory_format=torch.contiguous_format) if is_folded(x) else x for x in results]
            flag = any_exception()
            noted = flag is not None
            return results if flag is None else [*results, flag]

    # Autograd would update written views by as_strided, which functionalization rejects (pytorch/pytorch#104505): it
    # must replay the views.
    with state.fake_tensors(), force_original_view_tracking(True), without_warnings():
        if any_size:
            warnings.filterwarnings("error", _LOOPS)
        try:
            graph = make_fx(flat)(*inputs())
        except UserWarning as error:
            raise TraceError(said(error)) from error
        except RuntimeError as error:
            if isinstance(error, TorchVersionError) or is_users(error, handled):
                raise
            raise TraceError(said(error) + getattr(error, "users_line", "")) from error
    _drop_failed(graph, compiles=compiles)
    if not compiles:
        simplify(graph)
    return Traced(graph, _lifted(graph), outline, noted, max(state.block_sizes, default=0))


def said(error: Exception) -> str:
    """Return the first line of an error, torch's with its class, as text: a traceback would keep the batch alive."""
    first = (str(error) or "?").splitlines()[0].rstrip(".")
    return first if isinstance(error, LossError) else f"{type(error).__name__}: {first}"


def _lifted(graph: GraphModule) -> list[Tensor]:
    """Turn the constant tensors of a graph into its last inputs, and return them."""
    constants = {node: getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    nodes = {node: x for node, x in constants.items() if isinstance(x, Tensor)}  # others are the bodies of loops
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    inputs: dict[int, tuple[Node, Tensor]] = {}
    for node, tensor in nodes.items():
        if id(tensor) not in inputs:
            with graph.graph.inserting_after(last):
                last = graph.graph.placeholder(f"captured_{len(inputs)}")
            inputs[id(tensor)] = last, tensor
        node.replace_all_uses_with(inputs[id(tensor)][0])
        graph.graph.erase_node(node)
    graph.recompile()
    return [tensor for _, tensor in inputs.values()]


def _drop_failed(graph: GraphModule, *, compiles: bool) -> None:
    """Remove the operations that raised during tracing and whose errors the loss caught: they have no value.

    Operations that return nothing have none either. Those that write are kept; checks of values, which Inductor does
    not take, are kept where the graph runs as it is.
    """
    for node in reversed(list(graph.graph.nodes)):
        may_fail = node.op == "call_function" and not node.users and "val" not in node.meta
        returns = not isinstance(node.target, OpOverload) or bool(schema(node.target).returns)
        if may_fail and (returns or (compiles and not writes(node))):
            graph.graph.erase_node(node)
