"""The graph of an only chunk, kept from the first pass for the second: there is no other to make room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from persample.composite.encode import whole
from persample.gradients import Gradients
from persample.inputs.call import Call
from persample.inputs.loss import SampleLoss
from persample.reductions.requested import Reductions
from persample.utils import trees


class KeptGraph:
    """Encodes one chunk with a graph, and back-propagates through it later."""

    def __init__(self) -> None:
        self._params: tuple[Tensor, ...] = ()
        self._z: list[Tensor] = []

    def encode(self, encoder: SampleLoss, samples: Call) -> Any:
        """Return z, detached.

        Args:
            encoder: f, of a whole chunk.
            samples: the chunk.
        """
        with torch.enable_grad():
            self._params = tuple(param.detach().requires_grad_() for param in samples.params)
            z = whole(encoder, replace(samples, params=self._params))
        self._z = trees.flatten(z)[0]
        return trees.map_tensors(Tensor.detach, z)

    def lifted(self, lift: Reductions, encoder: SampleLoss, cotangents: Sequence[Tensor | None]) -> Any:
        """Back-propagate dL/dz, and lift the gradient as that of one sample, as ``engines.whole`` does.

        Args:
            lift: what to do with the gradient; only sums mean anything.
            encoder: f.
            cotangents: dL/dz, one per leaf of z; None where L does not depend on it.

        Returns:
            What ``lift`` returns.
        """
        pairs = [(z, c) for z, c in zip(self._z, cotangents, strict=True) if c is not None and z.requires_grad]
        grads: Sequence[Tensor | None] = [None] * len(self._params)
        if pairs:
            outputs, given = zip(*pairs, strict=True)
            grads = torch.autograd.grad(outputs, self._params, grad_outputs=given, allow_unused=True)
        filled = [torch.zeros_like(x) if g is None else g for x, g in zip(self._params, grads, strict=True)]
        return lift.lift(
            Gradients.dense(
                [x.detach().unsqueeze(0) for x in filled],
                spec=encoder.spec,
                losses=filled[0].real.new_zeros(1),
                connected=any(g is not None for g in grads),
            )
        )
