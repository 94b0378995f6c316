"""From a graph of aten operations to compiled code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from persample._torch import FakeTensorMode, aten_unsafe_index_put, compile_graph, decompositions, lacks_cpp_compiler
from persample.engines.compiled.kernels import kept
from persample.engines.compiled.products import choose
from persample.engines.compiled.streaming import stream
from persample.engines.compiled.tanh import tanh

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default}
# What Inductor computes in place of the first argument where nobody else needs that, even if its rows are one row.
_WRITTEN = {
    *(_aten.index_put.default, aten_unsafe_index_put),
    *(_aten.slice_scatter.default, _aten.select_scatter.default, _aten.diagonal_scatter.default),
}
_warned: set[str] = set()
Run = Callable[[list[Tensor]], Sequence[Tensor]]


def lower(graph: GraphModule, flat: GraphModule, mode: FakeTensorMode, inputs: Sequence[Tensor]) -> Run:
    """Compile a graph with Inductor, the compiler behind ``torch.compile``.

    Its own entry point is called, below the guards of ``torch.compile``: what they would check is in our key. Where no
    code can be made, one warning says so, and the graph is run operation by operation.

    Args:
        graph: a flat graph of aten operations without state.
        flat: the same, made functional.
        mode: the mode of the inputs.
        inputs: fake tensors like those it will be called with.

    Returns:
        A function from a list of tensors (which it empties) to the outputs.
    """
    try:
        with warnings.catch_warnings():  # torch's compiler speaks to its own developers
            warnings.simplefilter("ignore")
            return _compiled(flat, mode, inputs)
    except Exception as error:  # noqa: BLE001 (whatever goes wrong in a compiler, the graph is right)
        advice = _advice(error)
        if advice not in _warned:
            _warned.add(advice)
            warnings.warn(advice, RuntimeWarning, stacklevel=2)
        return lambda tensors: graph(*tensors)


def functional(graph: GraphModule, mode: FakeTensorMode, inputs: Sequence[Tensor]) -> GraphModule:
    """Return the same graph without writes in place, and in the operations that Inductor knows.

    Args:
        graph: a flat graph of aten operations.
        mode: the mode of the inputs.
        inputs: fake tensors like those it will be called with.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    table = kept({**decompositions(), _aten.tanh.default: tanh})
    if mode.shape_env is not None:  # those of products treat very small ones apart, and so split the sizes
        table = {operation: rule for operation, rule in table.items() if operation not in _PRODUCTS}
    with mode:
        pure = make_fx(torch.func.functionalize(graph))(*inputs)
        for node in pure.graph.nodes:
            # The operations that others are made of may lay out their results differently, where no view exists.
            if node.target is _aten.view.default:
                node.target = _aten.reshape.default
            if node.target in _WRITTEN and 0 in _known_strides(node.args[0]):
                with pure.graph.inserting_before(node):
                    node.update_arg(0, pure.graph.call_function(_aten.clone.default, (node.args[0],)))
        pure.recompile()
        return make_fx(pure, decomposition_table=table)(*inputs)


def _compiled(graph: GraphModule, mode: FakeTensorMode, inputs: Sequence[Tensor]) -> Run:
    choose(graph)
    stream(graph)
    # With channels last, which Inductor prefers on CPUs, convolutions of many groups take twice as long.
    grouped = any(map(_is_grouped, graph.graph.nodes))
    code: Any = compile_graph(graph, mode, inputs, prefers_channels_last=not grouped)
    return code


def _known_strides(node: Any) -> list[int]:
    return [stride for stride in node.meta["val"].stride() if isinstance(stride, int)]


def _is_grouped(node: Node) -> bool:
    return node.target is _aten.convolution_backward.default and bool(node.args[9] != 1)


def _advice(error: Exception) -> str:
    if lacks_cpp_compiler(error):
        reason = "found no C++ compiler. Install one (Debian: apt install g++), or point CXX to it"
    else:
        reason = f"failed in torch's compiler ({type(error).__name__}: {str(error).splitlines()[0]})"
    return (
        f"engine='compiled' {reason}. The traced program runs operation by operation meanwhile: the same results, "
        "faster than engine='eager' and slower than compiled code."
    )
