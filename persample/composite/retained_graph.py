"""Plain autograd for a single chunk: the first pass retains its graph, and no second pass is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from persample.composite.chunk_engine import one_row
from persample.composite.encode import encode_chunk
from persample.composite.first_pass import compact
from persample.engines.diagnosis import unwritten
from persample.gradients import Gradients
from persample.inputs.call import Call
from persample.utils import trees
from persample.utils.backward import BackwardGuard

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
