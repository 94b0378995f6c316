"""Averages: a product that is divided by a number, and is then a result of the program.

The smaller operand of the product is divided instead, which is a pass over less memory. Quotients inside of a loss stay
as they are: they would be rounded differently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

_aten = torch.ops.aten
_VIEWS = {_aten.view.default, _aten.permute.default}


def divide_operands(graph: GraphModule) -> None:
    """Replace results ``(a @ b) / n`` by ``(a / n) @ b``, or by ``a @ (b / n)``, in place.

    Args:
        graph: a flat graph of aten operations whose nodes have fake values. What is replaced is left as dead code.
    """
    for quotient in graph.graph.find_nodes(op="call_function", target=_aten.div.Tensor):
        if any(user.op != "output" for user in quotient.users) or not _is_number(quotient.args[1]):
            continue
        steps = _product_and_views(quotient.args[0])
        product = steps[0]
        if product.target is not _aten.mm.default or any(len(x.users) > 1 for x in steps):
            continue
        # Sizes that no trace knows cannot be compared: the comparison would hold for every later call.
        is_static = all(isinstance(x.meta["val"].numel(), int) for x in (product, *product.args))
        if is_static and product.meta["val"].dtype == quotient.meta["val"].dtype:
            smaller = min(product.args, key=_size)
            if _size(smaller) < _size(product):
                _divide(smaller, steps, quotient)


def _divide(operand: Node, steps: list[Node], quotient: Node) -> None:
    """Compute the steps again in place of a quotient, with another operand: the given one, divided."""
    with quotient.graph.inserting_before(quotient):  # the divisor may come after the product
        new = {operand: _quotient(operand, quotient.args[1])}
        for step in steps:
            new[step] = quotient.graph.node_copy(step, lambda x: new.get(x, x))
    quotient.replace_all_uses_with(new[steps[-1]])


def _product_and_views(x: Any) -> list[Any]:
    """Return what a node is a view of, and every view on the way to it."""
    steps = [x]
    while steps[-1].target in _VIEWS:
        steps.append(steps[-1].args[0])
    return steps[::-1]


def _is_number(divisor: Any) -> bool:
    value = divisor.meta["val"] if isinstance(divisor, Node) else divisor
    return value.ndim == 0 if isinstance(value, Tensor) else isinstance(value, (int, float))


def _size(node: Any) -> int:
    return int(node.meta["val"].numel())


def _quotient(operand: Node, divisor: Any) -> Node:
    new = operand.graph.call_function(_aten.div.Tensor, (operand, divisor))
    new.meta["val"] = new.target(*(x.meta["val"] if isinstance(x, Node) else x for x in new.args))  # type: ignore[operator]
    return new
