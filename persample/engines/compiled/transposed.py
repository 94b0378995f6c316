"""Products ``w @ x`` of a vector, and ``(w @ x.T).T``: they are laid out as the samples are, without a copy."""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from persample._torch import SETS_MODE
from persample.engines.compiled.batchable import dims_of, example_of, name_of, nodes_of, writes
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
        module: a graph of Dynamo, in which no shape changes in place.
    """
    nodes = nodes_of(module)
    for node in nodes:
        if node.target in _OF_VECTORS and not node.kwargs and dims_of(node.args) == [2, 1]:
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


def _product_with_a_vector(matrix: Tensor, x: Tensor) -> Tensor:
    return x @ matrix.mT if is_batched(x) and not is_batched(matrix) else matrix @ x


def _is_transposed(user: Node, product: Node) -> bool:
    """Return whether a node is a product with its last two axes swapped, in any spelling."""
    is_transpose = name_of(user) in _TRANSPOSES or (user.target is getattr and user.args[1] in {"T", "mT"})
    view, x = example_of(user), example_of(product)  # none in an inner vmap, where shapes cannot be read later
    if not is_transpose or view is None or x is None:
        return False
    return x.ndim > 1 and (view.shape, view.stride()) == (x.mT.shape, x.mT.stride())


def _transposed_product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``(left @ right).mT``."""
    is_layer = is_batched(right) and not is_batched(left) and left.ndim > 1 and right.ndim > 1
    return right.mT @ left.mT if is_layer and right.mT.is_contiguous() else (left @ right).mT
