"""Products of large matrices in compiled code, which oneDNN computes where it is faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from persample.cpu import gemm
from persample.engines.compiled.operations import define

_aten = torch.ops.aten


def _like(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: ARG001
    return left.new_empty(left.shape[0], right.shape[1])


# What torch has for oneDNN, compiled code may call only with weights that never change.
define("product(Tensor left, Tensor right, Tensor? bias=None) -> Tensor", gemm.product, _like)


def choose(graph: GraphModule) -> None:
    """Make the products of a graph those that are faster.

    Args:
        graph: a flat graph of aten operations, with an example of every result; changed in place.
    """
    for node in graph.graph.nodes:
        operands = _operands(node)
        if operands is not None:
            left, *others = operands
            if left.meta["val"].stride(1) != 1:  # it is read row by row, and who writes it can do so
                with graph.graph.inserting_before(node):
                    copy: Any = graph.graph.call_function(_aten.clone.default, (left,))
                    copy.kwargs = {"memory_format": torch.contiguous_format}
                    copy.meta["val"] = left.meta["val"].clone(memory_format=torch.contiguous_format)
                    left = copy
            node.target, node.args, node.kwargs = torch.ops.persample.product.default, (left, *others), {}
    graph.recompile()


def _operands(node: Any) -> Any:
    if node.target is _aten.mm.default:
        operands = node.args
    elif node.target is _aten.addmm.default and not node.kwargs:
        bias, *matrices = node.args
        operands = (*matrices, bias)
    else:
        return None
    return operands if gemm.suits(*(x.meta["val"] for x in operands)) else None
