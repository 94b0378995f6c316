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

from persample.engines.compiled.batchable import dims_of, example_of, nodes_of


def take_rows(module: GraphModule) -> None:
    """Let linear layers take the row of a matrix of one row, and let ``y[0]`` be a view of another shape, in place.

    Args:
        module: a graph of Dynamo, in which no shape changes in place.
    """
    for node in nodes_of(module):
        if node.target is operator.getitem and type(node.args[1]) is int and _has_one_row(node.args[0]):
            node.target, node.args = torch.squeeze, (node.args[0], 0)
        elif node.target is F.linear and _is_layer(node, [2, 2, 1]) and _has_one_row(node.args[0]):
            node.target = _linear
        elif node.target is torch.addmm and _is_layer(node, [1, 2, 2]) and _has_one_row(node.args[1]):
            node.target = _addmm


def _has_one_row(x: Any) -> bool:
    example = example_of(x)
    return example is not None and example.shape[:1] == (1,)


def _is_layer(node: Node, dims: list[int]) -> bool:
    """Return whether the arguments of a node are tensors of so many axes, and of the dtype of its result, a matrix."""
    tensors = [*node.args, node]
    if node.kwargs or dims_of(tensors) != [*dims, 2]:
        return False
    return len({example.dtype for example in map(example_of, tensors) if example is not None}) == 1  # not by autocast


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x.squeeze(0), weight, bias).unsqueeze(0)


def _addmm(bias: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
    return (bias + x.squeeze(0) @ matrix).unsqueeze(0)
