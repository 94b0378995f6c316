"""Products that are divided by a number: the smaller operand is divided instead, where that is a pass over less memory.

Averages are sums of products, divided by the number of samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

_aten = torch.ops.aten
_VIEWS = {_aten.view.default, _aten.permute.default}


def divide_operands(graph: GraphModule) -> None:
    """Replace ``(a @ b) / n`` by ``(a / n) @ b``, or by ``a @ (b / n)``, in place.

    Args:
        graph: a flat graph of aten operations without writes, whose nodes have fake values.
    """
    for quotient in graph.graph.find_nodes(op="call_function", target=_aten.div.Tensor):
        product, views = _under_views(quotient.args[0])
        if product.target is not _aten.mm.default or any(len(x.users) > 1 for x in (product, *views)):
            continue
        smaller: Any = min(product.args, key=lambda x: x.meta["val"].numel())
        if _is_by_a_number(quotient) and _is_smaller(smaller.meta["val"], product.meta["val"], quotient.meta["val"]):
            _divide(smaller, [product, *views], quotient)
    graph.graph.eliminate_dead_code()


def _divide(operand: Node, steps: list[Node], quotient: Node) -> None:
    """Replace a quotient by the steps from a product to it, of which one operand is divided."""
    with quotient.graph.inserting_before(quotient):  # the divisor may come after the product
        new = {operand: _quotient(operand, quotient.args[1])}
        for step in steps:
            new[step] = quotient.graph.node_copy(step, lambda x: new.get(x, x))
    quotient.replace_all_uses_with(new[steps[-1]])


def _under_views(x: Any) -> tuple[Any, list[Any]]:
    """Return what a node is a view of, and the views, from the first to the last."""
    views: list[Any] = []
    while x.target in _VIEWS:
        views.insert(0, x)
        x = x.args[0]
    return x, views


def _is_by_a_number(quotient: Node) -> bool:
    divisor = quotient.args[1]
    return not isinstance(divisor, Node) or divisor.meta["val"].ndim == 0


def _is_smaller(operand: Any, product: Any, quotient: Any) -> bool:
    """Return whether an operand has fewer numbers than the product, in any case; the quotient must have its dtype."""
    sizes = operand.numel(), product.numel()
    is_static = all(isinstance(size, int) for size in sizes)
    return is_static and sizes[0] < sizes[1] and product.dtype == quotient.dtype


def _quotient(operand: Node, divisor: Any) -> Node:
    new = operand.graph.call_function(_aten.div.Tensor, (operand, divisor))
    new.meta["val"] = new.target(*(x.meta["val"] if isinstance(x, Node) else x for x in new.args))  # type: ignore[operator]
    return new
