"""Sums of a matrix product and another tensor, as two operations.

torch's ``addmm``, of which each step of a recurrent layer has one, first copies the other tensor, and adds the product
to the copy. A sum of its own is computed in the loop that reads it, without a copy. Inductor makes ``addmm`` of both
operations, and parts it on GPUs only.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

_aten = torch.ops.aten
_DTYPES = (torch.float32, torch.float64)  # shorter ones would be rounded before the sum, too


def part_sums(graph: Graph) -> None:
    """Replace ``addmm`` on CPUs by a product and a sum.

    Args:
        graph: a graph of aten operations; it is changed.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.addmm.default):
        value = node.meta["val"]
        if node.kwargs or value.device.type != "cpu" or value.dtype not in _DTYPES:
            continue
        other, left, right = node.args
        with graph.inserting_before(node):
            product = graph.call_function(_aten.mm.default, (left, right))
            total = graph.call_function(_aten.add.Tensor, (other, product))
        product.meta, total.meta = dict(node.meta), dict(node.meta)
        node.replace_all_uses_with(total)
        graph.erase_node(node)
