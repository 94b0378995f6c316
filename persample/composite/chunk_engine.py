"""The engine of functions that take a whole chunk: plain autograd, and only the chunk's total."""

from __future__ import annotations

from typing import Any

from persample import naive
from persample.engines.diagnosis import diagnosed
from persample.gradients import Gradients
from persample.inputs.call import Call
from persample.inputs.loss import SampleLoss
from persample.reductions.requested import Reductions
from persample.utils.trees import tree_map


def whole(lift: Reductions, loss: SampleLoss, samples: Call, randomness: str) -> Any:  # noqa: ARG001
    """Compute the gradient of a loss of a whole chunk and lift it as that of one sample.

    Args:
        lift: what to do with the gradient; only sums mean anything.
        loss: the loss of the chunk.
        samples: the chunk, not empty.
        randomness: not looked at; random operations are let be.

    Returns:
        What ``lift`` returns.
    """
    with diagnosed(samples, loss, batched=False):
        value, (aux, has_aux), grads = naive.value_and_grad(
            loss, samples.params, samples.leaves, like=loss.params.tensors
        )
    pairs = zip(samples.params, grads, strict=True)
    return lift(
        Gradients.dense(
            [(x.new_zeros(x.shape) if g is None else g).unsqueeze(0) for x, g in pairs],
            spec=loss.spec,
            losses=value.unsqueeze(0),
            aux=tree_map(lambda leaf: leaf.unsqueeze(0), aux),
            has_aux=has_aux,
            connected=any(g is not None for g in grads),
        )
    )
