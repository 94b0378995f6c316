"""Compilation of a graph of aten operations by Inductor, and the operations that it leaves to torch's kernels.

Inductor's versions of these are wrong, or round differently. Rounding matters where a gradient consists of rounding
errors, as the derivative 1 − tanh² of a saturated unit does. Inductor calls another library's tanh, and computes some
gradients by other formulas (1 − σ for 1 / (1 + e^x), float64 constants for float32 ones). In float32, where that tanh
takes twice as long, too, tanh is a formula.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from persample._torch import (
    FakeTensorMode,
    OpOverload,
    aten_unsafe_index_put,
    compile_graph,
    compiling,
    decompositions,
    enable_python_dispatcher,
    functionalize,
    keep_kernel,
    scan,
    schema,
)
from persample.engines.compiled.checking import Checked
from persample.engines.compiled.straight import Run, straight, writes
from persample.errors import CompilerWarning, TorchVersionError
from persample.utils import trees
from persample.utils.isolation import in_one_thread
from persample.utils.tracing import without_warnings
from persample.utils.trees import Leaf

_aten = torch.ops.aten
_Rule = Callable[..., object]  # returns ``NotImplemented`` where it has no answer


# tanh(x) ≈ x + x³ P(x²) for |x| < 0.75. Our own fit of the relative error (weighted least squares, the weights raised
# where the error is largest until it is even): 3.7e-8, half of float32's rounding.
_SMALL = 0.75
_P = (-0.3333306908607483, 0.13326521217823029, -0.0533902570605278, 0.019664909690618515, -0.004769487306475639)


def tanh(x: Tensor) -> object:
    """Return the hyperbolic tangent of float32 on a CPU, to 1.3 units in the last place; leave others to Inductor.

    Beyond ``_SMALL`` its size is 1 − 2 / (exp(2 |x|) + 1). That rounds to 1 where it should: an error of a few units
    would be all that is left of the derivative 1 − tanh² there.
    """
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return NotImplemented
    size, square = x.abs(), x * x
    correction: Tensor | float = _P[-1]
    for coefficient in _P[-2::-1]:
        correction = correction * square + coefficient
    small, large = size + size * (square * correction), 1 - 2 / ((2 * size).exp() + 1)
    return torch.copysign(torch.where(size < _SMALL, small, large), x)


def with_torch_kernels(table: Mapping[OpOverload, _Rule]) -> dict[OpOverload, _Rule]:
    """Return a table of decompositions in which the operations of this file call torch's kernels."""
    table = {**table, _aten.tanh.default: tanh}
    if torch.__version__ < "2.15":
        table[_aten.pow.Scalar] = _power
    kept = [*_LEFT_TO_TORCH, *filter(_is_nearest, table)]
    return {**table, **{x: functools.partial(_decomposed, x, table.get(x, _kept)) for x in kept}}


def torch_kernel(operation: object, args: Sequence[Leaf]) -> _Rule | None:
    """Return an operation that calls torch's kernel for traced arguments; None where Inductor computes the same."""
    if not isinstance(operation, OpOverload):
        return None
    rule = _is_scaled if _is_nearest(operation) else _LEFT_TO_TORCH.get(operation)
    return _opaque(operation) if rule is not None and rule(*args) else None


def _decomposed(operation: OpOverload, otherwise: _Rule, *args: Leaf, **kwargs: object) -> object:
    return (torch_kernel(operation, args) or otherwise)(*args, **kwargs)


def _kept(*_args: object, **_kwargs: object) -> object:
    return NotImplemented  # make_fx then leaves the operation as it is


def _power(base: complex, exponent: Tensor) -> object:
    """Return a power of tensors: C++ passes numbers as floats, and would read powers of floats as integers."""
    dtype = torch.result_type(base, exponent)
    if dtype.is_floating_point or dtype.is_complex:
        return NotImplemented
    return torch.full((), base, dtype=dtype, device=exponent.device) ** exponent


@functools.cache
def _is_nearest(operation: object) -> bool:
    """Return whether an operation resizes images to their nearest elements: to a size, by scales, and by no corners."""
    names = [x.name for x in schema(operation).arguments] if isinstance(operation, OpOverload) else []
    return names[1:2] == ["output_size"] and names[-1].startswith("scales") and "align_corners" not in names


def _is_scaled(x: Tensor, sizes: Sequence[object], *rest: object) -> bool:
    """Return whether the nearest elements depend on how scales are rounded, where torch has special cases."""
    shape, scales = (rest[0], rest[1:]) if rest and isinstance(rest[0], Sequence) else (x.shape, rest)
    for size, before, scale in itertools.zip_longest(sizes, shape[2:], scales):
        is_static = isinstance(size, int) and isinstance(before, int)
        if not is_static or size not in {before, 2 * before, 4 * before} or scale not in {None, size / before}:
            return True
    return False


_TANH, _MEANS = (_aten.tanh, _aten.tanh_backward), (_aten.avg_pool2d_backward, _aten.avg_pool3d_backward)
_WRITTEN = _aten.diagonal_scatter, _aten.as_strided_scatter
_ROUNDED = _aten.hardsigmoid_backward, _aten.soft_margin_loss_backward, _aten.binary_cross_entropy_backward
_LEFT_TO_TORCH: dict[OpOverload, Callable[..., bool]] = {
    **{x.default: lambda x, *_: x.device.type == "cpu" and x.dtype == torch.float64 for x in _TANH},
    **{x.default: lambda x, *_: x.device.type == "cpu" for x in _ROUNDED},
    # With ceil_mode, count_include_pad and no divisor, Inductor divides by too much at the border.
    **{x.default: lambda *args: args[5] and args[6] and args[7] is None for x in _MEANS},
    # Inductor reads a complex copy before it has written the part into it.
    **{x.default: lambda x, *_: x.is_complex() for x in _WRITTEN},
    # Until torch 2.14, its decomposition counts what comes after -1.
    _aten.multilabel_margin_loss_forward.default: lambda *_: torch.__version__ < "2.14",
}


@functools.cache
def _opaque(operation: OpOverload) -> _Rule:
    """Return an operation ``persample::…`` that calls torch's kernel, registered when a program first needs it."""
    name, _, signature = str(schema(operation)).removeprefix("aten::").partition("(")
    compute = functools.partial(_computed, operation)
    own = torch.library.custom_op(f"persample::{name}", compute, mutates_args=(), schema=f"({signature}")
    own.register_fake(compute)
    return own


def _computed(operation: _Rule, *args: object) -> object:
    return trees.map_tensors(Tensor.contiguous, operation(*args))


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
