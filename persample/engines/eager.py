"""The eager engine: ``torch.func.vmap`` over ``torch.func.grad``, operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from persample.diagnose import diagnosed
from persample.errors import LossError
from persample.gradients import Gradients
from persample.loss import NOT_CONNECTED, SampleLoss
from persample.samples import Samples
from persample.trees import tree_map


def eager(lift: Callable[[Gradients], Any], loss: SampleLoss, samples: Samples, randomness: str) -> Any:
    """Compute the gradients of all samples at once and lift them.

    Args:
        lift: what to do with the gradients.
        loss: the loss of one sample.
        samples: the chunk, not empty.
        randomness: as in ``torch.func.vmap``.

    Returns:
        What ``lift`` returns.

    Raises:
        LossError: if the loss depends on no parameter, or does what vmap cannot batch.
    """
    has_aux = False

    def one(params: list[Tensor], *rows: Tensor) -> tuple[Tensor, Any]:
        nonlocal has_aux
        row = iter(rows)
        leaves = [next(row) if split else x for x, split in zip(samples.leaves, samples.leaves_batched, strict=True)]
        value, (aux, has_aux) = loss(params, leaves)
        if not value.requires_grad:  # under grad: no path from params to the loss
            raise LossError(NOT_CONNECTED)
        return value, aux

    rows = [x for x, split in zip(samples.leaves, samples.leaves_batched, strict=True) if split]
    dims = ([0 if split else None for split in samples.params_batched], *(0 for _ in rows))
    with diagnosed(samples, loss, batched=True):
        gradient = vmap(grad_and_value(one, has_aux=True), in_dims=dims, randomness=randomness)
        grads, (losses, aux) = gradient(list(samples.params), *rows)
    aux = tree_map(torch.clone, aux)  # it may be the user's own tensors
    return lift(
        Gradients.dense(grads, spec=loss.spec, losses=losses, aux=aux, has_aux=has_aux, weights=samples.weights)
    )
