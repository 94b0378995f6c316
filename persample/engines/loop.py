"""The loop engine: plain autograd, one sample at a time, for losses that vmap cannot take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from persample import naive
from persample.engines.diagnosis import diagnosed
from persample.errors import SAY_RANDOMNESS, LossError
from persample.gradients import Gradients
from persample.inputs.call import Call
from persample.utils import rng
from persample.utils.trees import tree_map
from persample.vmap_rules.effects import guarded


def loop(call: Call, required_ops: frozenset[str]) -> Gradients:  # noqa: ARG001 (gradients are dense anyway)
    """Compute the gradients one sample at a time.

    Args:
        call: the chunk, not empty. Random operations are rejected under "error", replayed for every sample under
            "same", and left alone under "different".
        required_ops: ignored.

    Raises:
        LossError: if the loss draws random numbers under "error".
    """
    losses, returned, grads = zip(*_rows(call), strict=True)
    stacked = _stacked_losses(losses)
    columns = zip(call.params, call.loss.spec.shapes, zip(*grads, strict=True), strict=True)
    lead = stacked.shape[1:]  # [K] of K outputs
    return Gradients.dense(
        [
            torch.stack([x.new_zeros((*lead, *shape)) if g is None else g for g in column])
            for x, shape, column in columns
        ],
        spec=call.loss.spec,
        losses=stacked,
        aux=_stacked([aux for aux, _ in returned]),
        has_aux=returned[0][1],
        weights=call.weights,
        # No generator, where Python closes one early: an interrupt that comes then is lost.
        connected={g is None for row in grads for g in row} != {True},
    )


def _rows(call: Call) -> Iterator[tuple[Any, ...]]:
    loss, start = call.loss, rng.snapshot()
    for i in rng.replayed(range(call.size), call.randomness):
        with diagnosed(call, batched=False):
            params, leaves = call.at(i)
            options: dict[str, Any] = {"like": loss.params.tensors, "create_graph": call.differentiated}
            row = loss.params.unchanged(partial(naive.value_and_grad, guarded(loss), params, leaves, **options))
        if call.randomness == "error" and rng.moved_since(start):
            raise LossError(f"{loss.called} drew random numbers, received randomness='error'. {SAY_RANDOMNESS}")
        yield row


def _stacked_losses(losses: Sequence[Tensor]) -> Tensor:
    sizes = sorted({len(loss) for loss in losses if loss.ndim})
    if len(sizes) > 1:
        raise LossError(
            f"loss_fn: expected as many outputs from every sample (outputs='rows'), received {sizes}. Return vectors "
            "of one length, padded with zeros."
        )
    return torch.stack(list(losses))


def _stacked(aux: list[Any]) -> Any:
    try:
        return tree_map(lambda *leaves: torch.stack(leaves), *aux)
    except (RuntimeError, ValueError) as error:
        raise LossError(
            "loss_fn: expected aux of the same structure and shapes from every sample, received aux that differ. "
            f"Return the same from each, padded where it is shorter. torch said: {error}"
        ) from error
