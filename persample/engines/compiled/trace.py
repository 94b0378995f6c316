"""From a function of tensors to one flat graph of aten operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from persample._torch import (
    FakeTensor,
    TorchDispatchMode,
    aten_efficientzerotensor,
    aten_local_scalar_dense,
    force_original_view_tracking,
)
from persample.engines.compiled.bounds import Bounds
from persample.engines.compiled.packing import drop_failed, pack
from persample.utils.origin import handled_error, is_users
from persample.utils.strides import is_folded
from persample.utils.tracing import Trace, untraced


class TraceError(Exception):
    """What a loss does cannot be traced: it depends on values, or torch has no rule for it."""


class Format(NamedTuple):
    """What a program must know of a tensor that it is given.

    Attributes:
        shape: its sizes.
        stride: its strides.
        dtype: its dtype.
        device: where it is.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> Format:
        """Return the format of a tensor."""
        return cls(tuple(x.shape), x.stride(), x.dtype, x.device)

    def empty(self, shape: Sequence[Any] | None = None, stride: Sequence[Any] | None = None) -> Tensor:
        """Return a tensor of this format, or of another size, that holds anything."""
        sizes, steps = shape or self.shape, stride or self.stride
        return torch.empty_strided(sizes, steps, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Traced:
    """A function as a graph.

    Args:
        graph: from the inputs, then the captured tensors, to the tensors of the result, then whether it counts not.
        captured: tensors that the function took from elsewhere.
        values: numbers that it read from such tensors, and relied on.
        outline: what makes the result of its tensors.
        noted: whether the last output tells of exceptional cases, in which the others do not count.
        written: how many numbers it writes out at a time, if it is for any number of samples.
    """

    graph: GraphModule
    captured: list[Tensor]
    values: list[tuple[Tensor, Any]]
    outline: Any
    noted: bool
    written: int = 0


class _Values(TorchDispatchMode):
    """Lets values of tensors be read that are not traced: those that the loss closed over.

    And gives zeros memory, which torch's tangents and gradients do without: operations on such end in fake tensors that
    are none, or in the process.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: list[tuple[Tensor, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Read a value, or let the operation be.

        Args:
            func: an operation of aten.
            types: the subclasses of tensors among the arguments.
            args: its arguments.
            kwargs: its keyword arguments.

        Returns:
            What the operation returns.
        """
        if func is aten_efficientzerotensor:
            return torch.ops.aten.zeros.default(*args, **(kwargs or {}))
        if func is not aten_local_scalar_dense or isinstance(args[0], FakeTensor):
            return func(*args, **(kwargs or {}))
        with untraced():
            value = args[0].item()
        self.read.append((args[0], value))
        return value


class _Lists(TorchFunctionMode):
    """Notes the same of ``tolist``, which is no operation.

    Args:
        read: where to.
    """

    def __init__(self, read: list[tuple[Tensor, Any]]) -> None:
        super().__init__()
        self._read = read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch.

        Args:
            func: the function.
            types: the subclasses of tensors among the arguments.
            args: its arguments.
            kwargs: its keyword arguments.

        Returns:
            What the function returns.
        """
        result = func(*args, **(kwargs or {}))
        if func is Tensor.tolist:
            self._read.append((args[0], result))
        return result


def trace(
    function: Callable[[list[Tensor]], Any], inputs: Callable[[], list[Tensor]], *, any_size: bool = False
) -> Traced:
    """Trace a function.

    Args:
        function: from tensors to a tree of tensors and of dataclasses that hold some.
        inputs: makes tensors of the formats that the function will be called with, in whose place fake ones are traced.
        any_size: whether the graph will be one for any number of samples.

    Returns:
        Its graph.

    Raises:
        TraceError: if torch refuses to trace what it does.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # it takes half a second to import

    outline, noted, values, handled = None, False, _Values(), handled_error()
    state = Trace(any_size)

    def flat(*tensors: Tensor) -> list[Tensor]:
        nonlocal outline, noted
        exceptions = state.exceptions
        with values, _Lists(values.read), Bounds(exceptions):
            results, outline = pack(function(list(tensors)))
            noted = bool(exceptions)
            results = [x.clone(memory_format=torch.contiguous_format) if is_folded(x) else x for x in results]
            if not noted:
                return results
            device = exceptions[0].device  # an index may lie elsewhere than its table
            return [*results, torch.stack([x.to(device) for x in exceptions]).any()]

    # Views written into are replayed: by strides, as autograd writes them otherwise, they cannot be made functional.
    with state.fake_tensors(), force_original_view_tracking(True):
        try:
            graph = make_fx(flat)(*inputs())
        except RuntimeError as error:
            if is_users(error, handled):
                raise
            raise TraceError(said(error)) from error
    drop_failed(graph)
    return Traced(graph, _lifted(graph), values.read, outline, noted, max(state.block_sizes, default=0))


def said(error: Exception) -> str:
    """Return the first line of what an error says, as text: its traceback would keep the batch alive.

    Args:
        error: the error.
    """
    return f"{type(error).__name__}: {(str(error) or '?').splitlines()[0]}"


def _lifted(graph: GraphModule) -> list[Tensor]:
    """Return the tensors that a graph holds, and make them its last inputs."""
    nodes = {node: getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    inputs: dict[int, tuple[Any, Tensor]] = {}
    for node, tensor in nodes.items():
        if id(tensor) not in inputs:
            with graph.graph.inserting_after(last):
                last = graph.graph.placeholder(f"captured_{len(inputs)}")
            inputs[id(tensor)] = last, tensor
        node.replace_all_uses_with(inputs[id(tensor)][0])
        graph.graph.erase_node(node)
    graph.recompile()
    return [tensor for _, tensor in inputs.values()]
