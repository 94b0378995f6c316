"""Products ``w @ x`` of a vector, and ``(w @ x.T).T``: they are laid out as the samples are, without a copy."""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from persample._torch import SETS_MODE
from persample.engines.compiled.batchable import memory_of, name_of, writes
from persample.engines.compiled.in_place_shapes import changes_shapes
from persample.vmap_rules.batched import is_batched

_PRODUCTS = {torch.matmul, torch.mm, operator.matmul, "matmul", "mm"}
_OF_VECTORS = {torch.matmul, torch.mv, operator.matmul, "matmul", "mv"}
_TRANSPOSES = {"t", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis"}


def flip_products(module: GraphModule) -> None:
    """Replace ``w @ x`` of a vector, and ``(w @ x.mT).mT``, by ``x @ w.mT``, in place.

    What is computed from the latter gets another layout than in the loss. So views become reshapes. Such products stay
    as they are if the loss writes into a tensor, which may or may not be a copy, depending on the layout; if it asks
    for strides; and if it switches gradients off for some operations, of which the transpose may be one.

    Args:
        module: a graph of Dynamo.
    """
    graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes]
    for node in nodes if not changes_shapes(module) else ():
        if node.target in _OF_VECTORS and _is_of_a_vector(node):
            node.op, node.target = "call_function", _product_with_a_vector
    products = [node for node in nodes if node.target in _PRODUCTS and not node.kwargs]
    flipped = [node for node in products if all(_is_transposed(user, node) for user in node.users)]
    if not flipped or any(writes(node) or name_of(node) in {"as_strided", *SETS_MODE} for node in nodes):
        return
    for node in flipped:
        with node.graph.inserting_before(node):
            product = node.graph.call_function(_transposed_product, node.args)
        for user in list(node.users):
            user.replace_all_uses_with(product)
            node.graph.erase_node(user)
        node.graph.erase_node(node)
    for node in nodes:
        if node.target == "view" and not any(isinstance(x, torch.dtype) for x in node.args):
            node.target = "reshape"


def _is_of_a_vector(node: Node) -> bool:
    if node.kwargs or None in map(memory_of, node.args):
        return False
    return [x.meta["example_value"].ndim for x in node.args] == [2, 1]  # type: ignore[union-attr]


def _product_with_a_vector(matrix: Tensor, x: Tensor) -> Tensor:
    return x @ matrix.mT if is_batched(x) and not is_batched(matrix) else matrix @ x


def _is_transposed(user: Node, product: Node) -> bool:
    """Return whether a node is a product with its last two axes swapped, in any spelling."""
    is_transpose = name_of(user) in _TRANSPOSES or (user.target is getattr and user.args[1] in {"T", "mT"})
    if not is_transpose or memory_of(user) is None:  # such as one in an inner vmap, whose shapes cannot be read later
        return False
    view, x = user.meta["example_value"], product.meta["example_value"]
    return x.ndim > 1 and (view.shape, view.stride()) == (x.mT.shape, x.mT.stride())


def _transposed_product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``(left @ right).mT``."""
    is_layer = is_batched(right) and not is_batched(left) and left.ndim > 1 and right.ndim > 1
    return right.mT @ left.mT if is_layer and right.mT.is_contiguous() else (left @ right).mT
