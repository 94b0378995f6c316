"""Products that a loss transposes, as in ``(w @ x.T).T``: they are laid out as the samples are, without a copy."""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from persample.engines.compiled.batchable import memory_of, written_memory
from persample.vmap_rules.batched import is_batched

_PRODUCTS = {torch.matmul, torch.mm, operator.matmul, "matmul", "mm"}


def flip_products(module: GraphModule) -> None:
    """Replace ``(w @ x.mT).mT`` by ``x @ w.mT``, in place.

    What is computed from it gets another layout than in the loss. So views become reshapes; and a loss stays as it is
    if it writes into a view, or asks for strides.

    Args:
        module: a graph of Dynamo.
    """
    graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes]
    products = [node for node in nodes if node.target in _PRODUCTS and not node.kwargs]
    flipped, views = list(filter(_is_only_transposed, products)), list(filter(_is_view, nodes))
    written = {None}.union(*map(written_memory, graphs))
    asks = any(node.target in {"as_strided", torch.as_strided} for node in nodes)
    if not flipped or asks or any(memory_of(view) in written for view in views):
        return
    for node in flipped:
        with node.graph.inserting_before(node):
            product = node.graph.call_function(_transposed_product, node.args)
        for user in list(node.users):
            product.meta = user.meta
            user.replace_all_uses_with(product)
            node.graph.erase_node(user)
        node.graph.erase_node(node)
    for view in views:
        view.target = "reshape"


def _is_view(node: Node) -> bool:
    """Return whether a node is a view in another shape, not in another dtype."""
    return node.target == "view" and not any(isinstance(x, torch.dtype) for x in node.args)


def _is_only_transposed(product: Node) -> bool:
    return bool(product.users) and all(_is_transposed(user, product) for user in product.users)


def _is_transposed(user: Node, product: Node) -> bool:
    """Return whether a node is a view of a product with its last two axes swapped, in any spelling."""
    memory = memory_of(user)
    if memory is None or memory != memory_of(product):
        return False
    view, x = user.meta["example_value"], product.meta["example_value"]
    return x.ndim > 1 and (view.shape, view.stride()) == (x.mT.shape, x.mT.stride())


def _transposed_product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``(left @ right).mT``."""
    is_layer = is_batched(right) and not is_batched(left) and left.ndim > 1 and right.ndim > 1
    return right.mT @ left.mT if is_layer and right.mT.is_contiguous() else (left @ right).mT
