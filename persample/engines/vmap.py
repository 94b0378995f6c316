"""The eager engine: ``torch.func.vmap`` over ``torch.func.vjp``, operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.func import vjp, vmap

from persample.cpu import mode as kernels
from persample.engines.deferred import Deferral, factor_of
from persample.engines.diagnosis import diagnosed
from persample.engines.layers import engine as layers
from persample.engines.layers.shared import NotLayersError
from persample.gradients import Gradients
from persample.inputs.call import Call
from persample.inputs.loss import NotConnectedError, SampleLoss
from persample.reductions.requested import Reductions
from persample.utils import rng
from persample.utils.fallback import explained
from persample.utils.numeric import full_precision, known_indices
from persample.utils.trees import tree_map
from persample.vmap_rules import SecondDerivativeError, composed, rewritten


def eager(lift: Reductions, loss: SampleLoss, samples: Call, randomness: str, *, shortly: bool = True) -> Any:
    """Compute the gradients of all samples at once and lift them.

    Args:
        lift: what to do with the gradients.
        loss: the loss of one sample.
        samples: the chunk, not empty.
        randomness: as in ``torch.func.vmap``.
        shortly: try the short way first, where the loss may be one for it.

    Returns:
        What ``lift`` returns.

    Raises:
        LossError: if the loss depends on no parameter, or does what vmap cannot batch.
    """
    transformed = peek_interpreter_stack() is not None  # by the caller
    uses = lift.required_ops - {"materialize"} if lift.keep_factored else lift.required_ops
    if shortly and randomness == "error" and not transformed and layers.suits(loss, samples):
        try:
            found = layers.gradients(loss, samples, uses)
        except NotLayersError:
            pass
        else:
            return lift(found)
    # Seen through transforms of the caller's, tensors cannot stand for others; and what is asked for whole is computed.
    whole = "materialize" in uses or transformed
    mode = kernels.expected(samples.params, samples.leaves) if whole else Deferral(uses, samples.params)
    grads, losses, aux, has_aux = batched_gradients(loss, samples, randomness, mode)
    with known_indices():
        with full_precision(losses.device):
            factors = tuple(factor_of(grad, uses) for grad in grads)
        return lift(Gradients(factors, loss.spec, losses, aux, has_aux, samples.weights))


def batched_gradients(
    loss: SampleLoss, samples: Call, randomness: str, backward_mode: AbstractContextManager[Any]
) -> tuple[list[Tensor], Tensor, Any, bool]:
    """Differentiate the loss of all samples at once.

    Args:
        loss: the loss of one sample.
        samples: the chunk, not empty.
        randomness: as in ``torch.func.vmap``.
        backward_mode: what the backward pass runs under.

    Returns:
        The gradients ``[B, *shape]`` of each parameter, the losses, aux, and whether the loss returned any.

    Raises:
        LossError: if the loss depends on no parameter, or does what vmap cannot batch.
    """
    has_aux = False
    forward_mode = kernels.expected(samples.params, samples.leaves)

    def value_of(params: list[Tensor], leaves: list[Any]) -> tuple[Tensor, Any]:
        nonlocal has_aux
        with rewritten(), forward_mode:
            value, (aux, has_aux) = loss(params, leaves)
        if not value.requires_grad:  # under vjp: no path from params to the loss
            raise NotConnectedError
        return value, aux

    def one(params: list[Tensor], leaves: list[Any]) -> tuple[list[Tensor], Tensor, Any]:
        value, backward, *aux = vjp(lambda params: value_of(params, leaves), params, has_aux=True)
        with backward_mode, torch.no_grad():  # no graph of the backward pass: nobody differentiates it
            (grads,) = backward(torch.ones_like(value), retain_graph=False)
        return grads, value, aux[0]

    start = rng.snapshot() if randomness != "error" else None
    with diagnosed(samples, loss, batched=True), explained():
        try:
            grads, losses, aux = vmapped(one, samples, randomness)
        except SecondDerivativeError:
            if start is not None:
                rng.rewind(start)
            with composed():
                grads, losses, aux = vmapped(one, samples, randomness)
    return grads, losses, tree_map(torch.clone, aux), has_aux  # aux may be the user's own tensors


def vmapped(one: Callable[[list[Tensor], list[Any]], Any], samples: Call, randomness: str) -> Any:
    """Call a function for all samples at once.

    Args:
        one: from the parameters and the leaves of one sample to a tree of tensors.
        samples: the chunk, not empty.
        randomness: as in ``torch.func.vmap``.

    Returns:
        What the function returns, every tensor with a leading batch axis.
    """
    given = [*samples.params, *samples.leaves]
    split = [*samples.params_batched, *samples.leaves_batched]

    def of_row(*rows: Tensor) -> Any:
        row = iter(rows)  # what all samples share does not pass through vmap
        values = [next(row) if batched else x for x, batched in zip(given, split, strict=True)]
        return one(values[: len(samples.params)], values[len(samples.params) :])

    return vmap(of_row, randomness=randomness)(*[x for x, batched in zip(given, split, strict=True) if batched])
