"""The engine of functions that take a whole chunk: plain autograd, and only the chunk's total."""

from __future__ import annotations

from persample import naive
from persample.engines.diagnosis import diagnosed
from persample.gradients import Gradients
from persample.inputs.call import Call
from persample.utils.trees import tree_map


def whole(call: Call, required_ops: frozenset[str]) -> Gradients:  # noqa: ARG001 (only sums are asked for)
    """Compute the gradient of a loss of a whole chunk, as if it were that of one sample.

    Args:
        call: the chunk, not empty, and its loss.
        required_ops: not looked at; only sums mean anything.
    """
    loss = call.loss
    with diagnosed(call, batched=False):
        value, (aux, has_aux), grads = naive.value_and_grad(loss, call.params, call.leaves, like=loss.params.tensors)
    pairs = zip(call.params, grads, strict=True)
    return Gradients.dense(
        [(x.new_zeros(x.shape) if g is None else g).unsqueeze(0) for x, g in pairs],
        spec=loss.spec,
        losses=value.unsqueeze(0),
        aux=tree_map(lambda leaf: leaf.unsqueeze(0), aux),
        has_aux=has_aux,
        connected=any(g is not None for g in grads),
    )
