"""One call in the form that engines take: the loss of one sample, and parameters and batch as flat tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from persample.factors import cost_model
from persample.inputs.loss import SampleLoss
from persample.utils.tracing import is_recorded


@dataclass(frozen=True)
class Call:
    """The normalized arguments of a call, or of one chunk of it.

    Args:
        loss: the loss of one sample.
        size: B.
        params: one tensor per differentiated parameter.
        params_batched: for each of ``params``, whether it holds one parameter per sample, on axis 0.
        leaves: the leaves of the batch, tensors or constants.
        leaves_batched: for each of ``leaves``, whether it holds one row per sample, on axis 0.
        weights: ``[B]`` float64, or None for ones.
        randomness: "error", "same" or "different", as in ``torch.func.vmap``.
        differentiated: whether the caller differentiates the results.
        memory: the bytes that written-out gradients may take, "low" or None; or a ``Budget``.
    """

    loss: SampleLoss
    size: int
    params: tuple[Tensor, ...]
    params_batched: tuple[bool, ...]
    leaves: tuple[Any, ...]
    leaves_batched: tuple[bool, ...]
    weights: Tensor | None = None
    randomness: str = "error"
    differentiated: bool = False
    memory: Any = None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the loss is called with."""
        return [x for x in (*self.params, *self.leaves) if isinstance(x, Tensor)]

    @property
    def budget(self) -> cost_model.Budget:
        """The memory for written-out gradients."""
        if isinstance(self.memory, cost_model.Budget):
            return self.memory
        if self.loss.outputs == "rows":  # K is not known yet
            return cost_model.budget(self.memory, math.inf)
        written_out = 0
        for x, split in zip(self.params, self.params_batched, strict=True):
            written_out += x.nbytes * (1 if split else self.size)
        return cost_model.budget(self.memory, written_out)

    def plan(self, required_ops: frozenset[str]) -> cost_model.Plan:
        """Return how gradients are stored.

        Args:
            required_ops: the operations of ``Factor`` that the reductions call.
        """
        return cost_model.Plan(required_ops, *self.budget)

    def chunks(self, chunk_size: int | None) -> Iterator[Call]:
        """Split the call into chunks of at most ``chunk_size`` samples, in order; not if weights are differentiated.

        Args:
            chunk_size: the number of samples in a chunk, or None for all.

        Yields:
            The chunks; one empty chunk if there are no samples.
        """
        step = chunk_size or self.size
        # A chunk whose weights are all 0 has no mean that could be merged with derivatives by its weights.
        has_recorded_weights = self.weights is not None and is_recorded(self.weights)
        if step >= self.size or has_recorded_weights:
            yield self
            return
        for start in range(0, self.size, step):
            yield self._chunk(slice(start, min(start + step, self.size)))

    def none(self) -> Call:
        """Return the chunk without samples."""
        return self._chunk(slice(0, 0))

    def _chunk(self, rows: slice) -> Call:
        params, leaves = self.at(rows)
        weights = None if self.weights is None else self.weights[rows]
        return replace(self, size=rows.stop - rows.start, params=params, leaves=leaves, weights=weights)

    def at(self, index: int | slice) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """Return the parameters and the leaves of one sample, or of a range of samples."""

        def pick(values: tuple[Any, ...], batched: tuple[bool, ...]) -> tuple[Any, ...]:
            return tuple(x[index] if split else x for x, split in zip(values, batched, strict=True))

        return pick(self.params, self.params_batched), pick(self.leaves, self.leaves_batched)
