"""Buffers that a forward pass changes: moved once in a call, however many chunks it had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from persample.composite.encoder import Tower
from persample.composite.processes import Processes
from persample.merge import merge
from persample.utils import trees
from persample.utils.dtypes import accumulate_dtype


@dataclass(frozen=True)
class Left:
    """What chunks left in a buffer, each having found it as it was before the call.

    Args:
        weight: how many samples they had.
        value: the mean over these samples of a floating buffer, what the last chunk left in any other.
    """

    weight: int
    value: Tensor

    def merge(self, other: Left) -> Left:
        """Return what both left."""
        weight = self.weight + other.weight
        if not other.weight or not self.weight:
            return Left(weight, self.value if self.weight else other.value)
        if not self.value.is_floating_point():
            return Left(weight, other.value)
        moved = self.value + (other.value - self.value) * (other.weight / weight)
        return Left(weight, torch.where(self.value == other.value, self.value, moved))  # ∞ − ∞ is no number


class Watch:
    """Notes what a pass over the chunks leaves in the buffers of the modules that an encoder is given."""

    def __init__(self) -> None:
        self.left: list[Left] = []

    def over(self, tower: Tower) -> Tower:
        """Return a tower whose encoder takes chunks, each of them noted."""
        fn = tower.encoder.fn

        def encode(params: Any, *sample: Any) -> Any:
            z = fn(params, *sample)
            rows = trees.flatten(z)[0][:1]
            size = len(rows[0]) if rows and isinstance(rows[0], Tensor) and rows[0].ndim else 0  # else refused later
            left = [_left(size, buffer) for buffer in _buffers(_modules(params))]
            self.left = merge(self.left, left) if self.left else left
            return z

        return tower.calling(encode)

    def write(self, modules: Sequence[nn.Module], processes: Processes) -> None:
        """Put what was noted, by all processes, into the modules' own buffers.

        Args:
            modules: those among the parameters.
            processes: which of them take part.
        """
        for buffer, left in zip(_buffers(modules), processes.merged(self.left), strict=True):
            value = left.value.to(buffer.dtype)
            if left.weight and not torch.equal(buffer, value):
                buffer.copy_(value)


def _left(size: int, buffer: Tensor) -> Left:
    value = buffer.detach().clone()
    return Left(size, value.to(accumulate_dtype(value.dtype)) if value.is_floating_point() else value)


def _modules(params: Any) -> list[nn.Module]:
    return [leaf for leaf in trees.flatten(params)[0] if isinstance(leaf, nn.Module)]


def _buffers(modules: Sequence[nn.Module]) -> list[Tensor]:
    return list(nn.ModuleList(modules).buffers())
