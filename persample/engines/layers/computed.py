"""Gradients of what the loss computes of parameters alone: scaled, masked, merged or normalized weights, penalties.

Such a tensor is a parameter of the rest of the loss. Where it is a sum of products with numbers and matrices
(``W / 2``, ``W + B A``), the gradients of the parameters are sums of products again, of signals or inputs times those.
Others are written out, one per sample, and pass through the graph of the computation in one batched backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from persample._torch import node_outputs, saved_by
from persample.engines.layers.recorder import LayerRecorder
from persample.engines.layers.shared import SharedParams
from persample.factors import Factor, Outer

_MOST = 32  # nodes of a graph, which are passed once for each path


def pull_back(params: SharedParams, recorder: LayerRecorder) -> None:
    """Add the gradients of computed parameters to those of the parameters that they were computed of.

    Args:
        params: the parameters.
        recorder: has the gradients of layers' parameters, and is given the new ones.
    """
    found: dict[int, Factor] = {}
    for place in [place for place in params.computed if place in recorder]:
        total = recorder.total(place)
        if place in params.parts and recorder.add_part(params.parts[place], total):
            continue  # of a sliced, split or reshaped parameter: products stay
        products = _products(params.computed[place].grad_fn, total)
        if products is None:
            found[place] = total
        for variable, factor in products or ():
            recorder.add_factor(next(k for k, x in enumerate(params.plain) if x is variable), factor)
    if found:
        _write_out(found, params, recorder)


def _products(node: Any, factor: Factor) -> list[tuple[Tensor, Outer]] | None:
    """Return the gradients of the leaves of a graph, or None where they are no sums of products."""
    if not isinstance(factor, Outer) or len(factor.param_shape) != 2 or not factor.has_rows:
        return None
    found: list[tuple[Tensor, Outer]] = []
    stack = [(node, factor)]
    for _ in range(_MOST):
        if not stack:
            return found
        node, factor = stack.pop()
        if hasattr(node, "variable"):
            found.append((node.variable, factor))
        elif node.name() not in _LINEAR:
            return None
        else:
            steps = _LINEAR[node.name()](saved_by(node))
            for (parent, place), step in zip(node.next_functions, steps, strict=False):
                if parent is not None:
                    pulled = None if step is None else step(factor)
                    output = node_outputs(parent)[place]
                    if pulled is None or (pulled.param_shape, pulled.dtype) != (tuple(output.shape), output.dtype):
                        return None  # or broadcast, or of another dtype
                    stack.append((parent, pulled))
    return None


_Step = Callable[[Outer], Outer]


def _times(number: Any, *, divided: bool = False) -> _Step | None:
    if isinstance(number, Tensor) and number.ndim:
        return None
    return lambda x: replace(x, left=x.left / number if divided else x.left * number)


def _of_product(saved: Any) -> Sequence[_Step]:
    left, right = saved("self"), saved("mat2")

    def of_left(x: Outer) -> Outer:
        return replace(x, right=x.right @ right.mT, param_shape=(x.param_shape[0], len(right)))

    def of_right(x: Outer) -> Outer:
        return replace(x, left=x.left @ left, param_shape=(left.shape[1], x.param_shape[1]))

    return of_left, of_right


def _as_it_is(x: Outer) -> Outer:
    return x


# From what a node of a graph has saved to what the gradient of each of its arguments is, of the gradient of its result.
_LINEAR: dict[str, Callable[[Any], Sequence[_Step | None]]] = {
    "AddBackward0": lambda saved: (_as_it_is, _times(saved("alpha"))),
    "SubBackward0": lambda saved: (_as_it_is, _times(-saved("alpha"))),
    "NegBackward0": lambda _saved: (_times(-1),),
    "MulBackward0": lambda saved: (_times(saved("other")), _times(saved("self"))),
    "DivBackward0": lambda saved: (_times(saved("other"), divided=True), None),
    "MmBackward0": _of_product,
}


def _write_out(found: dict[int, Factor], params: SharedParams, recorder: LayerRecorder) -> None:
    values, given = [params.computed[place] for place in found], params.plain[: len(params.given)]
    signals = [factor.materialize() for factor in found.values()]
    used: list[int] = []

    def of_one(*signals: Tensor) -> list[Tensor]:
        with torch.no_grad():
            grads = torch.autograd.grad(values, given, signals, allow_unused=True)
        used[:] = [place for place, grad in enumerate(grads) if grad is not None]
        return [grads[place] for place in used]

    grads = vmap(of_one if len(recorder.sizes) == 1 else vmap(of_one))(*signals)
    for place, grad in zip(used, grads, strict=True):
        recorder.add_written_out(place, grad)
