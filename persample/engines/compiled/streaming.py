"""Outer products written straight into ``out``, past the caches: what is larger than they are would only empty them."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from persample._torch import load_cpp
from persample.cpu.gemm import sizes
from persample.engines.compiled.operations import define

# Numbers from which a result is not worth caching (16 MiB).
_LARGE = 2**22
_SOURCE = """
#include <cstdint>
#ifdef __AVX__
#include <immintrin.h>
#endif

// out[b, r, c] = left[b, r] * right[b, c]. A streaming store does not read the line of memory that it overwrites.
extern "C" void outer(
    const float* left, const float* right, float* out, int64_t blocks, int64_t rows, int64_t columns
) {
    const bool streams = reinterpret_cast<uintptr_t>(out) % 32 == 0 && columns % 8 == 0;
    #pragma omp parallel
    {
        #pragma omp for nowait
        for (int64_t row = 0; row < blocks * rows; ++row) {
            const float* from = right + row / rows * columns;
            float* to = out + row * columns;
            int64_t column = 0;
#ifdef __AVX__
            const __m256 scale = _mm256_set1_ps(left[row]);
            for (; streams && column < columns; column += 8)
                _mm256_stream_ps(to + column, _mm256_mul_ps(scale, _mm256_loadu_ps(from + column)));
#endif
            for (; column < columns; ++column) to[column] = left[row] * from[column];
        }
#ifdef __AVX__
        _mm_sfence();
#endif
    }
}
"""
_aten = torch.ops.aten


@functools.cache
def _kernel() -> Any:
    """Return the loop, compiled as Inductor compiles its own."""
    from ctypes import c_int64, c_void_p

    kernel = load_cpp(_SOURCE).outer
    kernel.argtypes = [c_void_p] * 3 + [c_int64] * 3
    return kernel


def write_outer(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write the outer products of rows.

    Args:
        left: ``[*, o, 1]`` float32 on the CPU.
        right: ``[*, 1, i]`` likewise.
        out: where ``[*, o, i]`` is written, contiguous.
    """
    left, right = left.contiguous(), right.contiguous()
    rows, columns = left.shape[-2], right.shape[-1]
    _kernel()(left.data_ptr(), right.data_ptr(), out.data_ptr(), left.numel() // max(rows, 1), rows, columns)


define("write_outer(Tensor left, Tensor right, Tensor(a!) out) -> ()", write_outer, lambda *_: None)


def stream(graph: GraphModule) -> None:
    """Let the large outer products of a graph be written past the caches.

    Args:
        graph: a flat graph of aten operations, with an example of every result; changed in place.
    """
    for node in list(graph.graph.nodes):
        operands = _operands(node) if node.target is _aten.copy_.default else None
        if operands is not None:
            _kernel()
            with graph.graph.inserting_before(node):
                graph.graph.call_function(torch.ops.persample.write_outer.default, (*operands, node.args[0]))
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _operands(node: Any) -> Any:
    """Return what is multiplied, where the product of rows and columns is all that is written into an input."""
    out, source = node.args
    if source.target is _aten.copy.default:
        source = source.args[1]
    while source.target in (_aten.view.default, _aten.permute.default) and _keeps_order(source):
        source = source.args[0]
    if source.target is not _aten.mul.Tensor or not all(isinstance(x, Node) for x in source.args):
        return None
    whole, *operands = (x.meta["val"] for x in (out, *source.args))
    left, right, size = *(sizes(x) for x in operands), sizes(whole)
    known = all(x.dtype == torch.float32 and x.device.type == "cpu" for x in (whole, *operands))
    outer = len(left) == len(right) > 1 and left[:-2] == right[:-2] and left[-1] == right[-2] == 1
    fits = math.prod(size) == math.prod(left) * right[-1] and whole.is_contiguous()
    return source.args if known and outer and fits and math.prod(size) >= _LARGE else None


def _keeps_order(node: Any) -> bool:
    return node.target is _aten.view.default or list(node.args[1]) == sorted(node.args[1])
