"""The loop engine: plain autograd, one sample at a time, for losses that vmap cannot take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from persample import naive
from persample.engines.diagnosis import diagnosed
from persample.errors import SAY_RANDOMNESS, LossError
from persample.gradients import Gradients
from persample.inputs.call import Call
from persample.inputs.loss import SampleLoss
from persample.reductions.requested import Reductions
from persample.utils import rng
from persample.utils.trees import tree_map


def loop(lift: Reductions, loss: SampleLoss, samples: Call, randomness: str) -> Any:
    """Compute the gradients of one sample after the other and lift them together.

    Args:
        lift: what to do with the gradients.
        loss: the loss of one sample.
        samples: the chunk, not empty.
        randomness: what random operations do: "error" refuses them, "same" replays them, "different" lets them be.

    Returns:
        What ``lift`` returns.

    Raises:
        LossError: if the loss draws random numbers under "error".
    """
    losses, returned, grads = zip(*_rows(loss, samples, randomness), strict=True)
    columns = zip(samples.params, loss.spec.shapes, zip(*grads, strict=True), strict=True)
    return lift(
        Gradients.dense(
            [torch.stack([x.new_zeros(shape) if g is None else g for g in column]) for x, shape, column in columns],
            spec=loss.spec,
            losses=torch.stack(losses),
            aux=_stacked([aux for aux, _ in returned]),
            has_aux=returned[0][1],
            weights=samples.weights,
            connected=any(g is not None for row in grads for g in row),
        )
    )


def _rows(loss: SampleLoss, samples: Call, randomness: str) -> Iterator[tuple[Any, ...]]:
    start = rng.snapshot()
    for i in rng.replayed(range(samples.size), randomness):
        with diagnosed(samples, loss, batched=False):
            row = naive.value_and_grad(loss, *samples.at(i), like=loss.params.tensors)
        if randomness == "error" and rng.moved_since(start):
            raise LossError(f"{loss.called} drew random numbers, received randomness='error'. {SAY_RANDOMNESS}")
        yield row


def _stacked(aux: list[Any]) -> Any:
    try:
        return tree_map(lambda *leaves: torch.stack(leaves), *aux)
    except (RuntimeError, ValueError) as error:
        raise LossError(
            "loss_fn: expected aux of the same structure and shapes from every sample, received aux that differ. "
            f"Return the same from each, padded where it is shorter. torch said: {error}"
        ) from error
