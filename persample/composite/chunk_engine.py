"""Plain autograd for encoders that take whole chunks, which yields only the sum over a chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from persample import naive
from persample.composite.first_pass import compact, encode_chunk
from persample.engines.diagnosis import diagnosed, unwritten
from persample.gradients import Gradients
from persample.inputs.call import Call
from persample.utils import trees
from persample.utils.backward import BackwardGuard
from persample.utils.trees import tree_map
from persample.vmap_rules.effects import guarded


def chunk_engine(chunk: Call, required_ops: frozenset[str]) -> Gradients:  # noqa: ARG001 (an engine's signature)
    """Compute the gradient of the loss of a whole chunk.

    Args:
        chunk: the samples, at least one; the loss takes all of them.
        required_ops: not used.

    Returns:
        One row, the gradient of the chunk; aux has a leading axis of 1.
    """
    with diagnosed(chunk, batched=False):
        loss, tree = chunk.loss, chunk.loss.params
        differentiate = partial(naive.value_and_grad, guarded(loss), chunk.params, chunk.leaves, like=tree.tensors)
        value, (aux, has_aux), grads = tree.unchanged(differentiate)
    return one_row(chunk, grads, value, aux=tree_map(lambda leaf: leaf.unsqueeze(0), aux), has_aux=has_aux)


def one_row(chunk: Call, grads: Sequence[Tensor | None], loss: Tensor, **fields: Any) -> Gradients:
    """Return the gradient of a chunk as that of one sample.

    Args:
        chunk: the samples.
        grads: one gradient per parameter, None where there is no path to it.
        loss: 0-d, the loss of the chunk.
        **fields: further fields of ``Gradients``.
    """
    pairs = zip(chunk.params, grads, strict=True)
    return Gradients.dense(
        [(torch.zeros_like(x) if g is None else g).detach().unsqueeze(0) for x, g in pairs],
        spec=chunk.loss.spec,
        losses=loss.unsqueeze(0),
        connected=any(g is not None for g in grads),
        **fields,
    )


BackPropagate = Callable[[Sequence[Tensor | None]], Gradients]


def encode_with_graph(call: Call) -> tuple[Any, BackPropagate]:
    """Encode a chunk; return z, detached, and the function from dL/dz (one per leaf of z) to the chunk's gradient."""
    with torch.enable_grad(), unwritten(call):
        params = tuple(param.detach().requires_grad_() for param in call.params)
        z = encode_chunk(replace(call, params=params), "batched")
    outputs = trees.flatten(z)[0]

    def back_propagate(cotangents: Sequence[Tensor | None]) -> Gradients:
        pairs = [(x, c) for x, c in zip(outputs, cotangents, strict=True) if c is not None and x.requires_grad]
        grads: Sequence[Tensor | None] = [None] * len(params)
        if pairs:
            differentiated, given = zip(*pairs, strict=True)
            guard = BackwardGuard(params)
            grads = call.loss.params.call(params, lambda _: guard.grads(differentiated, given), ())
        return one_row(call, grads, loss=params[0].real.new_zeros(()))

    return trees.tree_map(compact, z), back_propagate
