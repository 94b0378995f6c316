"""Gradients of embedding tables that were not added up yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from persample.engines.deferred.terms import SignalTerm
from persample.factors.embedding import Embedding


@dataclass(frozen=True)
class Lookups(SignalTerm):
    """Rows added up in S tables of V rows: the gradient of embeddings.

    Args:
        signals: what is added, ``[S, T, D]``.
        index: to which row, ``[S, T]``.
        rows: V.
        shape: the shape of the tensor, ``[S·V, D]`` or a view of it.
    """

    index: Tensor
    rows: int
    shape: tuple[int, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The signals and the index."""
        return (self.signals, self.index)

    def compute(self, dtype: torch.dtype) -> Tensor:
        """Return the tables."""
        table = Embedding(self.signals.to(dtype), self.index, (self.rows, self.signals.shape[2]))
        return table.materialize().view(self.shape)

    def factor(self, dtype: torch.dtype) -> Embedding | None:
        """Return one table for each sample."""
        if self.shape[:2] != (len(self.signals), self.rows):
            return None
        return Embedding(self.signals.to(dtype), self.index, self.shape[1:])

    def reshape(self, shape: Sequence[int]) -> Lookups:
        """Return the tables in another shape."""
        return replace(self, shape=tuple(shape))

    def without(self, row: int) -> Lookups:
        """Return the tables with one row of each set to zero (padding)."""
        return replace(self, signals=self.signals.masked_fill((self.index == row)[..., None], 0))


@dataclass(frozen=True)
class SharedLookups(SignalTerm):
    """Rows added up in one table, in which the samples are some of the columns: the gradient of positions, for example.

    Args:
        signals: what is added, ``[T, C]``.
        index: to which row, ``[T]``.
        shape: the shape of the tensor, ``[V, C]`` or a view of it.
    """

    index: Tensor
    shape: tuple[int, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The signals and the index."""
        return (self.signals, self.index)

    def compute(self, dtype: torch.dtype) -> Tensor:
        """Return the table."""
        rows = prod(self.shape) // self.signals.shape[1]
        table = self.signals.new_zeros(rows, self.signals.shape[1], dtype=dtype)
        return table.index_add_(0, self.index, self.signals.to(dtype)).view(self.shape)

    def factor(self, dtype: torch.dtype) -> None:  # noqa: ARG002
        """Return None: the first axis are rows."""
        return

    def reshape(self, shape: Sequence[int]) -> SharedLookups | None:
        """Return the table in another shape, of the same rows."""
        return replace(self, shape=tuple(shape)) if shape[0] == self.shape[0] else None

    def permute(self, dims: Sequence[int]) -> Lookups | None:
        """Return one table for each sample, where these come to the front."""
        if len(dims) != 3 or tuple(dims) != (1, 0, 2):
            return None
        rows, samples, columns = self.shape
        signals = self.signals.view(-1, samples, columns).movedim(1, 0)
        return Lookups(signals, self.index.expand(samples, -1), rows, (samples, rows, columns))
