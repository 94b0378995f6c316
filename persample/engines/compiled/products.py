"""Products of large matrices in compiled code, which oneDNN computes where it is faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from persample import gemm

# Operations of ours that compiled code calls: torch's own for oneDNN takes only weights that never change.
library = torch.library.Library("persample", "DEF")
library.define("product(Tensor left, Tensor right, Tensor? bias=None) -> Tensor")
library.impl("product", gemm.product, "CPU")
_aten = torch.ops.aten


def _like(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: ARG001
    return left.new_empty(left.shape[0], right.shape[1])


torch.library.register_fake("persample::product", _like, lib=library)


def choose(graph: GraphModule) -> None:
    """Make the products of a graph those that are faster.

    Args:
        graph: a flat graph of aten operations, with an example of every result; changed in place.
    """
    for node in graph.graph.nodes:
        operands = _operands(node)
        if operands is not None:
            node.target, node.args, node.kwargs = torch.ops.persample.product.default, operands, {}
    graph.recompile()


def _operands(node: Any) -> Any:
    if node.target is _aten.mm.default:
        operands = node.args
    elif node.target is _aten.addmm.default and not node.kwargs:
        bias, *matrices = node.args
        operands = (*matrices, bias)
    else:
        return None
    tensors = [x.meta["val"] for x in operands]
    return operands if gemm.takes(*tensors) and gemm.pays(*map(sizes, tensors[:2])) else None


def sizes(x: Tensor) -> list[int]:
    """Return the shape of an example, by which something is decided for all sizes that vary."""
    return [int(n.node.hint) if isinstance(n, torch.SymInt) else n for n in x.shape]
