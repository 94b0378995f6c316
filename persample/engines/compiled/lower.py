"""Compilation of a graph of aten operations by Inductor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from persample._torch import (
    FakeTensorMode,
    compile_graph,
    decompositions,
    enable_python_dispatcher,
    functionalize,
    keep_kernel,
    lacks_cpp_compiler,
    scan,
)
from persample.engines.compiled.kernels import with_torch_kernels
from persample.engines.compiled.tanh import tanh
from persample.engines.compiled.writes import Pure, copy_overwritten
from persample.errors import CompilerWarning, TorchVersionError
from persample.utils.heap import keep_freed_memory
from persample.utils.tracing import without_warnings

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default}
_DRAWS = {_aten.rand.default, _aten.randn.default}
_warned: set[str] = set()
Run = Callable[[list[Tensor]], Sequence[Tensor]]


def lower(graph: GraphModule, flat: GraphModule, mode: FakeTensorMode, inputs: Sequence[Tensor]) -> Run:
    """Compile a graph with Inductor, the compiler behind ``torch.compile``.

    Inductor is called below the guards of ``torch.compile``: programs.py and Dynamo check what they would. If
    compilation fails, one warning says so, and the graph runs operation by operation.

    Args:
        graph: a flat graph of aten operations without state.
        flat: the graph that ``functional`` returned for it.
        mode: the fake tensor mode of the inputs.
        inputs: fake tensors with the shapes and dtypes of the program's inputs.

    Returns:
        A function from a list of tensors to the outputs; it empties the list.
    """
    try:
        with without_warnings():
            return _compiled(flat, mode, inputs)
    except TorchVersionError:
        raise
    except RuntimeError as error:  # of torch's compiler; the uncompiled graph is correct, too
        advice = _advice(error)
        if advice not in _warned:
            _warned.add(advice)
            warnings.warn(advice, CompilerWarning, stacklevel=2)
        return lambda tensors: graph.forward(*tensors)


def functional(graph: GraphModule, mode: FakeTensorMode, inputs: Sequence[Tensor]) -> GraphModule:
    """Return the same graph without in-place writes, decomposed into the operations that Inductor lowers.

    Args:
        graph: a flat graph of aten operations.
        mode: the fake tensor mode of the inputs.
        inputs: fake tensors with the shapes and dtypes of the program's inputs.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    table = with_torch_kernels({**decompositions(), _aten.tanh.default: tanh})
    if not all(isinstance(size, int) for x in inputs for size in x.shape):  # those of products branch on sizes
        table = {operation: rule for operation, rule in table.items() if operation not in _PRODUCTS}
    with mode, enable_python_dispatcher():  # operations in C++ refuse symbolic sizes or fix them
        pure = Pure(graph)
        if pure.needs_functionalization:  # with its views: a `reshape` that copies would lose writes through them
            pure = Pure(make_fx(functionalize(Interpreter(graph).run))(*inputs))
        flat = make_fx(pure.run, decomposition_table=table)(*inputs)
        copy_overwritten(flat.graph)
    flat.graph.eliminate_dead_code()  # Inductor would keep the operations that gave placeholders their shapes
    flat.recompile()
    return flat


def _compiled(graph: GraphModule, mode: FakeTensorMode, inputs: Sequence[Tensor]) -> Run:
    # Inductor prefers channels-last on CPUs, where convolutions of many groups take twice as long.
    grouped = [node for node in graph.graph.nodes if _is_grouped(node)]
    for node in grouped:
        if isinstance(node.args[9], Node):  # B times as many groups, in a program for any B
            keep_kernel(node)
    for node in graph.graph.nodes:
        if node.target in _DRAWS and node.kwargs.get("dtype") is None:  # Inductor takes it for float32
            node.kwargs = {**node.kwargs, "dtype": node.meta["val"].dtype}
    # In Python, a call of a small kernel takes longer than the kernel. Inductor's C++ frees inputs of loops twice
    # (torch 2.13), and was not tried on GPUs.
    has_loops = any(node.target is scan for node in graph.graph.nodes)
    on_cpu = all(x.device.type == "cpu" for x in inputs)
    in_cpp = on_cpu and not has_loops
    if on_cpu:
        keep_freed_memory()
    code: Any = compile_graph(graph, mode, inputs, prefers_channels_last=not grouped, calls_in_cpp=in_cpp)
    return code


def _is_grouped(node: Node) -> bool:
    return node.target is _aten.convolution_backward.default and bool(node.args[9] != 1)


def _advice(error: Exception) -> str:
    if lacks_cpp_compiler(error):
        reason = "found no C++ compiler. Install one (Debian: apt install g++), or point CXX to it"
    else:
        reason = f"failed in torch's compiler ({type(error).__name__}: {str(error).splitlines()[0]})"
    return (
        f"engine='compiled' {reason}. For now, the traced program runs operation by operation: the same results, "
        "faster than engine='eager' and slower than compiled code."
    )
