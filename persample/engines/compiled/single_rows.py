"""Matrices of one row, as ``keep_batch_dim`` and ``x[None]`` make them: layers are given the row itself.

Otherwise the gradient of a bias is a sum over one row, and that of ``y[0]`` is written into zeros: each a copy of what
is back-propagated.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from persample.engines.compiled.batchable import memory_of
from persample.engines.compiled.in_place_shapes import changes_shapes


def take_rows(module: GraphModule) -> None:
    """Let linear layers take the row of a matrix of one row, and let ``y[0]`` be a view of another shape, in place.

    Args:
        module: a graph of Dynamo.
    """
    if changes_shapes(module):
        return
    graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
    for node in [node for graph in graphs for node in graph.nodes]:
        _take_row(node)


def _take_row(node: Node) -> None:
    if node.target is operator.getitem and type(node.args[1]) is int and _has_one_row(node.args[0]):
        node.target, node.args = torch.squeeze, (node.args[0], 0)
    elif node.target is F.linear and _are(node, [2, 2, 1]) and _has_one_row(node.args[0]):
        node.target = _linear
    elif node.target is torch.addmm and _are(node, [1, 2, 2]) and _has_one_row(node.args[1]):
        node.target = _addmm


def _has_one_row(x: Any) -> bool:
    return memory_of(x) is not None and x.meta["example_value"].shape[:1] == (1,)


def _are(node: Node, dims: list[int]) -> bool:
    """Return whether the arguments of a node are tensors of so many axes, and of the dtype of its result."""
    if len(node.args) != len(dims) or node.kwargs or None in map(memory_of, (node, *node.args)):
        return False
    examples = [x.meta["example_value"] for x in (*node.args, node) if isinstance(x, Node)]
    return [x.ndim for x in examples[:-1]] == dims and len({x.dtype for x in examples}) == 1  # autocast


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x.squeeze(0), weight, bias).unsqueeze(0)


def _addmm(bias: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
    return (bias + x.squeeze(0) @ matrix).unsqueeze(0)
