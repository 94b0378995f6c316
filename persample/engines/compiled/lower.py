"""Compilation of a graph of aten operations by Inductor."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from persample._torch import (
    FakeTensorMode,
    aten_unsafe_index_put,
    compile_graph,
    compiling,
    decompositions,
    enable_python_dispatcher,
    functionalize,
    keep_kernel,
    scan,
)
from persample.engines.compiled.checking import Checked
from persample.engines.compiled.kernels import torch_kernel, with_torch_kernels
from persample.engines.compiled.straight import Run, straight, writes
from persample.errors import CompilerWarning, TorchVersionError
from persample.utils.isolation import in_one_thread
from persample.utils.tracing import without_warnings

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default}
_DRAWS = {_aten.rand.default, _aten.randn.default}
# Until torch 2.14, Inductor may overwrite the first argument of these, even if its rows share memory (stride 0).
_OVERWRITTEN = {
    *(_aten.index_put.default, aten_unsafe_index_put),
    *(_aten.slice_scatter.default, _aten.select_scatter.default, _aten.diagonal_scatter.default),
}
_warned: set[str] = set()


def lower(graph: GraphModule, flat: GraphModule, mode: FakeTensorMode, inputs: Sequence[Tensor], noted: bool) -> Run:
    """Compile a functional graph with Inductor, the compiler behind ``torch.compile``.

    Inductor is called below the guards of ``torch.compile``: programs.py and Dynamo check what they would. If
    compilation fails, one warning says so, and the graph runs operation by operation. ``flat`` is what
    ``decomposed`` returned for it. ``noted`` says that the last output is a flag, which invalidates the others.
    """

    @in_one_thread
    def compiled(other: GraphModule) -> Run:
        with compiling(), without_warnings():
            return _compiled(decomposed(other, mode, inputs), mode, inputs)

    try:
        with without_warnings():
            return Checked(graph, _compiled(flat, mode, inputs), compiled, noted=noted)
    except TorchVersionError:
        raise
    except (RuntimeError, MemoryError, OSError) as error:  # of torch's compiler; the uncompiled graph is correct, too
        advice = _advice(error)
        if advice not in _warned:
            _warned.add(advice)
            warnings.warn(advice, CompilerWarning, stacklevel=2)
        return straight(graph)


def functional(graph: GraphModule, mode: FakeTensorMode, inputs: Sequence[Tensor]) -> GraphModule:
    """Return the same graph without in-place writes, but for one into each written input at the end."""
    from torch.fx.experimental.proxy_tensor import make_fx

    if not any(map(writes, graph.graph.nodes)):
        return graph
    with mode, enable_python_dispatcher():
        return make_fx(functionalize(Interpreter(graph).run))(*inputs)


def decomposed(graph: GraphModule, mode: FakeTensorMode, inputs: Sequence[Tensor]) -> GraphModule:
    """Return a functional graph in the operations that Inductor lowers."""
    from torch.fx.experimental.proxy_tensor import make_fx

    table = with_torch_kernels(decompositions())
    if not all(isinstance(size, int) for x in inputs for size in x.shape):  # those of products branch on sizes
        table = {operation: rule for operation, rule in table.items() if operation not in _PRODUCTS}
    with mode, enable_python_dispatcher():  # operations in C++ refuse symbolic sizes or fix them
        flat = make_fx(_Decomposable(graph).run, decomposition_table=table)(*inputs)
        if torch.__version__ < "2.14":
            _copy_overwritten(flat.graph)
    flat.graph.eliminate_dead_code()  # Inductor would keep the operations that gave placeholders their shapes
    flat.recompile()
    return flat


class _Decomposable(Interpreter):
    """Runs a graph as decompositions need it."""

    def run_node(self, n: Node) -> object:
        """Return the result of a node."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target is _aten.view.default:  # results of decompositions may have other strides, and nothing is written
            return _aten.reshape.default(*args)
        if kernel := torch_kernel(n.target, args):  # before torch's Python dispatcher decomposes the operation
            return kernel(*args, **kwargs)
        return super().run_node(n)


def _copy_overwritten(graph: Graph) -> None:
    """Copy what Inductor may overwrite in a functional, decomposed graph, where rows of it share memory."""
    for node in graph.nodes:
        if node.target in _OVERWRITTEN and 0 in [x for x in node.args[0].meta["val"].stride() if isinstance(x, int)]:
            with graph.inserting_before(node):
                copy = graph.call_function(_aten.clone.default, node.args[:1])
            copy.meta["val"] = node.args[0].meta["val"].clone()
            node.update_arg(0, copy)


def _compiled(graph: GraphModule, mode: FakeTensorMode, inputs: Sequence[Tensor]) -> Run:
    # Inductor prefers channels-last on CPUs, where convolutions of many groups take twice as long.
    grouped = [node for node in graph.graph.nodes if _is_grouped(node)]
    for node in grouped:
        if isinstance(node.args[9], Node):  # B times as many groups, in a program for any B
            keep_kernel(node)
    for node in graph.graph.nodes:
        if node.target in _DRAWS and node.kwargs.get("dtype") is None:  # Inductor takes it for float32
            node.kwargs = {**node.kwargs, "dtype": node.meta["val"].dtype}
    # In Python, a call of a small kernel takes longer than the kernel. Inductor's C++ frees inputs of loops twice,
    # and was not tried on GPUs.
    has_loops = any(node.target is scan for node in graph.graph.nodes)
    in_cpp = not has_loops and all(x.device.type == "cpu" for x in inputs)
    return compile_graph(graph, mode, inputs, prefers_channels_last=not grouped, calls_in_cpp=in_cpp)


def _is_grouped(node: Node) -> bool:
    return node.target is _aten.convolution_backward.default and bool(node.args[9] != 1)


def _advice(error: Exception) -> str:
    if "No working C++ compiler" in str(error):
        reason = "found no C++ compiler. Install one (Debian: apt install g++), or point CXX to it"
    else:
        reason = f"failed in torch's compiler ({type(error).__name__}: {str(error).splitlines()[0]})"
    return (
        f"engine='compiled' {reason}. For now, the traced program runs operation by operation: the same results, "
        "faster than engine='eager' and slower than compiled code."
    )
