"""Tracing: a function of tensors becomes one flat graph of aten operations."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from persample._torch import OpOverload, force_original_view_tracking, schema
from persample.engines.compiled.bounds import Bounds
from persample.engines.compiled.packing import Outline, pack
from persample.engines.compiled.straight import simplify, writes
from persample.errors import TorchVersionError
from persample.utils import trees
from persample.utils.numerics import is_folded
from persample.utils.origin import is_users
from persample.utils.tracing import Trace, any_exception, without_warnings


class TraceError(Exception):
    """Raised for a loss that Dynamo cannot capture as one graph, or torch cannot trace; the message is the reason."""


# torch's warning where vmap runs an operation once for each sample.
_LOOPS = "There is a performance drop because we have not yet implemented the batching rule"


Size: TypeAlias = int | torch.SymInt  # the latter where a program is made for any number of samples


class Format(NamedTuple):
    """The properties of an input tensor that a program depends on.

    Attributes:
        shape: the sizes.
        stride: the strides.
        dtype: the dtype.
        device: the device.
    """

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
    """A function as a graph.

    Args:
        graph: from the inputs and the captured tensors to the tensors of the result and, optionally, a flag that
            invalidates the outputs.
        captured: the tensors that tracing made, which are constants of the graph.
        outline: the tree of the result.
        noted: whether the last output is the flag.
        written: the largest number of gradient elements written out at a time, for graphs of any batch size.
    """

    graph: GraphModule
    captured: list[Tensor]
    outline: Outline
    noted: bool
    written: int = 0


def trace(
    function: Callable[[list[Tensor]], object],
    inputs: Callable[[], list[Tensor]],
    *,
    any_size: bool = False,
    compiles: bool = True,
) -> Traced:
    """Trace a function of tensors.

    Args:
        function: from tensors to a tree of tensors and of dataclasses that hold tensors.
        inputs: makes the fake tensors that it is traced with.
        any_size: whether the graph will serve any number of samples. Then an operation that vmap runs once for each
            sample is an error: the graph would grow with their number.
        compiles: whether the graph will be compiled; else it is simplified, and runs operation by operation.

    Raises:
        TraceError: if torch cannot trace the function.
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
    """Return an error's class and the first line of its message, as text: its traceback would keep the batch alive."""
    return f"{type(error).__name__}: {(str(error) or '?').splitlines()[0]}"


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
