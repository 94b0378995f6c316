"""The eager engine: ``torch.func.vmap`` over ``torch.func.vjp``, operation by operation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from persample._torch import import_dynamo
from persample.engines import layers
from persample.engines.diagnosis import add_hint, diagnosed
from persample.gradients import Gradients
from persample.inputs.call import Call
from persample.inputs.loss import NotConnectedError
from persample.utils import rng
from persample.utils.interrupts import after_imports
from persample.utils.trees import tree_map
from persample.vmap_rules import SecondDerivativeError, VmapRules


def eager(call: Call, required_ops: frozenset[str]) -> Gradients:
    """Compute the gradients of all samples at once.

    ``engines/layers`` computes losses made of layers, which need one transform instead of two.

    Args:
        call: the chunk, not empty.
        required_ops: the operations of ``Factor`` that the reductions call.

    Raises:
        LossError: if the loss depends on no parameter, or vmap cannot batch it.
    """
    return factored(call, required_ops)[0]


def factored(call: Call, required_ops: frozenset[str]) -> tuple[Gradients, str]:
    """Return what ``eager`` returns, and why its gradients are not those of layers; "" if they are."""
    reason = layers.unsuited(call)
    if not reason:
        start = rng.snapshot() if call.randomness != "error" else None
        try:
            return layers.gradients(call, required_ops), ""
        except layers.NotLayersError as error:
            reason = str(error)
        except (ValueError, IndexError, TypeError) as error:
            add_hint(call, error)
            raise
        if start is not None:
            rng.rewind(start)
    # Outside of the block above, so that the error of a loss that is wrong is its own.
    return unfactored(call, required_ops), reason


def unfactored(call: Call, required_ops: frozenset[str]) -> Gradients:  # noqa: ARG001 (gradients are dense anyway)
    """Compute the gradients of all samples at once, written out, of any loss that vmap can batch.

    Args:
        call: the chunk, not empty.
        required_ops: ignored.

    Raises:
        LossError: if the loss depends on no parameter, or vmap cannot batch it.
    """
    if "torch._dynamo" not in sys.modules:  # torch.func.vjp imports it
        after_imports(import_dynamo)
    grads, losses, aux, has_aux = batched_gradients(call)
    facts = {"spec": call.loss.spec, "losses": losses, "aux": aux, "has_aux": has_aux, "weights": call.weights}
    return Gradients.dense(grads, **facts)


def batched_gradients(
    call: Call, rules: AbstractContextManager[Any] | None = None
) -> tuple[list[Tensor], Tensor, Any, bool]:
    """Differentiate the loss of all samples at once.

    Args:
        call: the chunk, not empty.
        rules: the context that the loss runs in; None for ``VmapRules``.

    Returns:
        The gradients of each parameter, ``[B, *shape]`` (``[B, K, *shape]`` of K outputs), the losses, aux, and whether
        the loss returned aux.

    Raises:
        LossError: if the loss depends on no parameter, or vmap cannot batch it.
    """
    has_aux = one_by_one = False
    forward_mode = VmapRules() if rules is None else rules

    def value_of(params: list[Tensor], leaves: list[Any]) -> tuple[Tensor, Any]:
        nonlocal has_aux, one_by_one
        with forward_mode:
            value, (aux, has_aux) = call.loss(params, leaves)
        if not value.requires_grad:  # under vjp: no path from params to the loss
            raise NotConnectedError
        one_by_one = value.ndim > 0 and _uses_factorizations(value)
        return value, aux

    def one(params: list[Tensor], leaves: list[Any]) -> tuple[list[Tensor], Tensor, Any]:
        value, backward, *aux = vjp(lambda params: value_of(params, leaves), params, has_aux=True)
        with nullcontext() if call.differentiated else torch.no_grad():
            grads = _pulled_back(backward, value, one_by_one=one_by_one)
        return grads, value, aux[0]

    start = rng.snapshot() if call.randomness != "error" else None
    with diagnosed(call, batched=True):
        try:
            grads, losses, aux = vmapped(one, call)
        except SecondDerivativeError:
            if start is not None:
                rng.rewind(start)
            forward_mode = VmapRules(differentiated_by="any")
            grads, losses, aux = vmapped(one, call)
    return grads, losses, tree_map(torch.clone, aux), has_aux  # aux may be the user's own tensors


def _pulled_back(backward: Callable[..., Any], value: Tensor, *, one_by_one: bool) -> list[Tensor]:
    """Return the gradients of a loss; of a vector those of each of its numbers, by one backward pass if that is right.

    Args:
        backward: the function that ``vjp`` returned.
        value: the loss.
        one_by_one: whether each number of a vector takes a backward pass of its own.
    """
    if value.ndim == 0:
        return backward(torch.ones_like(value), retain_graph=False)[0]
    units = torch.eye(len(value), dtype=value.dtype, device=value.device)
    if one_by_one:
        rows = [backward(unit, retain_graph=True)[0] for unit in units]
        return [torch.stack(column) for column in zip(*rows, strict=True)]
    return vmap(lambda unit: backward(unit, retain_graph=False)[0])(units)


def _uses_factorizations(value: Tensor) -> bool:
    """Return whether a value depends on a solution or determinant, whose backward pass torch batches wrongly twice.

    Under two levels of vmap without grad mode, torch 2.13 gives arbitrary numbers.
    """
    seen, stack = set[Any](), [value.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if node.name().startswith(("Linalg", "LuSolve", "TriangularSolve")):
            return True
        seen.add(node)
        stack.extend(parent for parent, _ in node.next_functions)
    return False


def vmapped(one: Callable[[list[Tensor], list[Any]], Any], call: Call) -> Any:
    """Call a function for all samples at once.

    Args:
        one: from the parameters and the leaves of one sample to a tree of tensors.
        call: the chunk, not empty.

    Returns:
        What the function returns, every tensor with a leading batch axis.
    """
    given = [*call.params, *call.leaves]
    split = [*call.params_batched, *call.leaves_batched]

    def of_row(*rows: Tensor) -> Any:
        row = iter(rows)  # values that all samples share are not passed through vmap
        values = [next(row) if batched else x for x, batched in zip(given, split, strict=True)]
        return one(values[: len(call.params)], values[len(call.params) :])

    return vmap(of_row, randomness=call.randomness)(*[x for x, batched in zip(given, split, strict=True) if batched])
