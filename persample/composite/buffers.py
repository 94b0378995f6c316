"""Buffers that a forward pass changes: updated once in a call, however many chunks it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from persample.inputs.call import Call
from persample.merge import merge
from persample.processes import Processes, merged
from persample.utils import trees
from persample.utils.numerics import accumulate_dtype


@dataclass(frozen=True)
class BufferUpdate:
    """The value of one buffer after chunks that each started from its value before the call.

    Args:
        weight: the number of samples of the chunks.
        value: of a floating buffer the mean over these samples, of any other the value after the last chunk.
    """

    weight: int
    value: Tensor

    def merge(self, other: BufferUpdate) -> BufferUpdate:
        """Return the update of the chunks of both."""
        weight = self.weight + other.weight
        if not (self.weight and other.weight and self.value.is_floating_point()):
            return replace(other if other.weight else self, weight=weight)
        mean = self.value + (other.value - self.value) * (other.weight / weight)
        return BufferUpdate(weight, torch.where(self.value == other.value, self.value, mean))  # ∞ − ∞ is NaN


class BufferRecorder:
    """Records the buffers of the modules among the parameters after each chunk of the first pass."""

    def __init__(self) -> None:
        self._updates: list[BufferUpdate] = []

    def recorded(self, chunk: Call) -> Call:
        """Return a chunk whose encoder records the buffers after its forward pass.

        Args:
            chunk: the samples; the encoder takes all of them at once.
        """
        fn = chunk.loss.fn

        def encode(params: Any, *sample: Any) -> Any:
            z = fn(params, *sample)
            modules = [leaf for leaf in trees.flatten(params)[0] if isinstance(leaf, nn.Module)]
            updates = [_update(chunk.size, buffer) for buffer in _buffers(modules)]
            self._updates = merge(self._updates, updates) if self._updates else updates
            return z

        return replace(chunk, loss=replace(chunk.loss, fn=encode))

    def write(self, modules: Sequence[nn.Module], processes: Processes) -> None:
        """Write the updates of all processes into the modules' own buffers.

        Args:
            modules: the modules among the parameters.
            processes: the processes that the samples are spread over.
        """
        for buffer, update in zip(_buffers(modules), merged(self._updates, processes), strict=True):
            value = update.value.to(buffer.dtype)
            if update.weight and not torch.equal(buffer, value):
                buffer.copy_(value)


def _update(size: int, buffer: Tensor) -> BufferUpdate:
    value = buffer.detach().clone()
    return BufferUpdate(size, value.to(accumulate_dtype(value.dtype)) if value.is_floating_point() else value)


def _buffers(modules: Sequence[nn.Module]) -> list[Tensor]:
    return list(nn.ModuleList(modules).buffers())
