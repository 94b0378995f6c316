"""The eager engine: ``torch.func.vmap`` over ``torch.func.vjp``, operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from persample._torch import transforms
from persample.engines import layers
from persample.engines.deferred import Deferral, factor_of
from persample.engines.diagnosis import diagnosed
from persample.gradients import Gradients
from persample.inputs.call import Call
from persample.inputs.loss import NotConnectedError
from persample.utils import rng
from persample.utils.dtypes import full_precision
from persample.utils.trees import tree_map
from persample.vmap_rules import SecondDerivativeError, VmapRules


def eager(call: Call, required_ops: frozenset[str]) -> Gradients:
    """Compute the gradients of all samples at once.

    ``engines/layers`` computes losses made of linear layers and embeddings, which need one transform instead of two.

    Args:
        call: the chunk, not empty.
        required_ops: the operations of ``Factor`` that the reductions call.

    Raises:
        LossError: if the loss depends on no parameter, or vmap cannot batch it.
    """
    if layers.suits(call):
        try:
            return layers.gradients(call, required_ops)
        except layers.NotLayersError:
            pass
    return by_vmap(call, required_ops)


def by_vmap(call: Call, required_ops: frozenset[str]) -> Gradients:
    """Compute the gradients of all samples of any loss that vmap can batch.

    Args:
        call: the chunk, not empty.
        required_ops: the operations of ``Factor`` that the reductions call.

    Raises:
        LossError: if the loss depends on no parameter, or vmap cannot batch it.
    """
    # Placeholders cannot pass through the caller's transforms; and "materialize" needs the gradients written out.
    in_full = bool(transforms()) or "materialize" in required_ops
    mode = nullcontext() if in_full else Deferral(required_ops, call.params)
    grads, losses, aux, has_aux = batched_gradients(call, mode)
    with full_precision(losses.device):
        factors = tuple(factor_of(grad, required_ops) for grad in grads)
    return Gradients(factors, call.loss.spec, losses, aux, has_aux, call.weights)


def batched_gradients(call: Call, backward_mode: AbstractContextManager[Any]) -> tuple[list[Tensor], Tensor, Any, bool]:
    """Differentiate the loss of all samples at once.

    Args:
        call: the chunk, not empty.
        backward_mode: the context that the backward pass runs in.

    Returns:
        The gradients ``[B, *shape]`` of each parameter, the losses, aux, and whether the loss returned aux.

    Raises:
        LossError: if the loss depends on no parameter, or vmap cannot batch it.
    """
    has_aux = False
    rules = VmapRules()

    def value_of(params: list[Tensor], leaves: list[Any]) -> tuple[Tensor, Any]:
        nonlocal has_aux
        with rules:
            value, (aux, has_aux) = call.loss(params, leaves)
        if not value.requires_grad:  # under vjp: no path from params to the loss
            raise NotConnectedError
        return value, aux

    def one(params: list[Tensor], leaves: list[Any]) -> tuple[list[Tensor], Tensor, Any]:
        value, backward, *aux = vjp(lambda params: value_of(params, leaves), params, has_aux=True)
        with backward_mode, torch.no_grad():  # record no graph: the backward pass is never differentiated
            (grads,) = backward(torch.ones_like(value), retain_graph=False)
        return grads, value, aux[0]

    start = rng.snapshot() if call.randomness != "error" else None
    with diagnosed(call, batched=True):
        try:
            grads, losses, aux = vmapped(one, call)
        except SecondDerivativeError:
            if start is not None:
                rng.rewind(start)
            rules = VmapRules(differentiated_by="any")
            grads, losses, aux = vmapped(one, call)
    return grads, losses, tree_map(torch.clone, aux), has_aux  # aux may be the user's own tensors


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
