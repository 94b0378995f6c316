"""Gradients of what the loss computes of parameters alone: scaled, masked, merged or normalized weights, penalties.

Such a tensor is a parameter of the rest of the loss. Its gradients, one per sample, pass through the graph of its
computation in one batched backward pass, with deferred products: half of a product is the product with half a signal.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import vmap

from persample.engines.layers.recorder import LayerRecorder
from persample.engines.layers.shared import SharedParams


def pull_back(params: SharedParams, recorder: LayerRecorder, rest: Mapping[int, Tensor | None]) -> None:
    """Add the gradients of computed parameters to those of the parameters that they were computed of.

    Args:
        params: the parameters.
        recorder: has the gradients of layers' parameters, and is given the new ones.
        rest: the gradients of copies, by place.
    """
    places = [place for place in params.computed if place in recorder or rest.get(place) is not None]
    if not places:
        return
    values, given = [params.computed[place] for place in places], params.plain[: len(params.given)]
    mode = recorder.deferral()
    signals = [mode.deferred(recorder.factor(place, rest.get(place))) for place in places]
    used: list[int] = []

    def of_sample(*signals: Tensor) -> list[Tensor]:
        with mode, torch.no_grad():
            grads = torch.autograd.grad(values, given, signals, allow_unused=True)
        used[:] = [place for place, grad in enumerate(grads) if grad is not None]
        return [grads[place] for place in used]

    recorder.record(used, vmap(of_sample)(*signals))
