"""The loop engine: plain autograd, one sample at a time, for losses that vmap cannot take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from persample import naive, rng
from persample.diagnose import diagnosed
from persample.errors import LossError
from persample.gradients import Gradients
from persample.loss import SampleLoss
from persample.samples import Samples
from persample.trees import tree_map


def loop(lift: Callable[[Gradients], Any], loss: SampleLoss, samples: Samples, randomness: str) -> Any:
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
    start = rng.snapshot()
    rows = []
    for i in rng.replayed(range(samples.size), randomness):
        with diagnosed(samples, loss, batched=False):
            rows.append(naive.value_and_grad(loss, *samples.at(i)))
        if randomness == "error" and rng.moved_since(start):
            raise LossError(
                "loss_fn drew random numbers, received randomness='error'. Pass randomness='different' (each sample "
                "its own) or 'same' (all samples the same), or put the module in eval mode."
            )
    losses, returned, grads = zip(*rows, strict=True)
    stacked = [
        torch.stack([x.new_zeros(shape) if g is None else g for g in column])
        for x, shape, column in zip(samples.params, loss.spec.shapes, zip(*grads, strict=True), strict=True)
    ]
    aux = _stacked([value for value, _ in returned])
    connected = any(g is not None for row in grads for g in row)
    return lift(
        Gradients.dense(
            stacked,
            spec=loss.spec,
            losses=torch.stack(losses),
            aux=aux,
            has_aux=returned[0][1],
            weights=samples.weights,
            connected=connected,
        )
    )


def _stacked(aux: list[Any]) -> Any:
    try:
        return tree_map(lambda *leaves: torch.stack(leaves), *aux)
    except (RuntimeError, ValueError) as error:
        raise LossError(
            "loss_fn: expected aux of the same structure and shapes from every sample, received aux that differ. "
            f"Return the same from each, padded where it is shorter. torch said: {error}"
        ) from error
