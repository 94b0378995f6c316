"""Gradients of what the loss computes of parameters alone: scaled, masked, merged or normalized weights, penalties.

Such a tensor is a parameter of the rest of the loss. Its gradients, one per sample, are written out, and pass through
the graph of its computation in one batched backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from persample.engines.layers.recorder import LayerRecorder
from persample.engines.layers.shared import SharedParams


def pull_back(params: SharedParams, recorder: LayerRecorder) -> None:
    """Add the gradients of computed parameters to those of the parameters that they were computed of.

    Args:
        params: the parameters.
        recorder: has the gradients of layers' parameters, and is given the new ones.
    """
    found = {place: recorder.total(place) for place in params.computed if place in recorder}
    for place in params.parts.keys() & found.keys():  # of a sliced, split or reshaped parameter: products stay
        if recorder.add_part(params.parts[place], found[place]):
            del found[place]
    if not found:
        return
    values, given = [params.computed[place] for place in found], params.plain[: len(params.given)]
    signals = [factor.materialize() for factor in found.values()]
    used: list[int] = []

    def of_one(*signals: Tensor) -> list[Tensor]:
        with torch.no_grad():
            grads = torch.autograd.grad(values, given, signals, allow_unused=True)
        used[:] = [place for place, grad in enumerate(grads) if grad is not None]
        return [grads[place] for place in used]

    grads = vmap(of_one if len(recorder.sizes) == 1 else vmap(of_one))(*signals)
    for place, grad in zip(used, grads, strict=True):
        recorder.add_written_out(place, grad)
