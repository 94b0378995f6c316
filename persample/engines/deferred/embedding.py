"""Deferred gradients of embedding tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from persample.engines.deferred.terms import SignalTerm
from persample.factors.embedding import Embedding
from persample.factors.output_list import OutputList


@dataclass(frozen=True)
class EmbeddingTerm(SignalTerm):
    """The gradient of embeddings: signals added to rows of S tables, one per sample.

    Args:
        shape: the shape of the tensor, ``[S·V, D]`` or a view of it.
        signals: the values that are added to rows, ``[S, T, D]``.
        index: for each value, the row of the sample's table, ``[S, T]``.
        num_rows: V, the number of rows of one table.
    """

    index: Tensor
    num_rows: int

    def compute(self, dtype: torch.dtype) -> Tensor:
        """Return the tables."""
        table = Embedding(self.signals.to(dtype), self.index, (self.num_rows, self.signals.shape[2]))
        return table.materialize().view(self.shape)

    def factor(self, dtype: torch.dtype) -> Embedding | None:
        """Return the factor of one table per sample."""
        if self.shape[:2] != (len(self.signals), self.num_rows):
            return None
        return Embedding(self.signals.to(dtype), self.index, self.shape[1:])

    def reshape(self, shape: Sequence[int]) -> EmbeddingTerm:
        """Return the tables in another shape."""
        return replace(self, shape=tuple(shape))

    def permute(self, dims: Sequence[int]) -> OutputsEmbeddingTerm | None:
        """Return the tables of K outputs, whose columns stand side by side, one after the other."""
        if tuple(dims[:3]) != (0, 2, 1) or len(dims) < 4 or self.shape[:2] != (len(self.signals), self.num_rows):
            return None
        shape = tuple(self.shape[dim] for dim in dims)
        return OutputsEmbeddingTerm(shape, self.signals, self.index, self.num_rows)

    def without(self, row: int) -> EmbeddingTerm:
        """Return the tables with one row of each set to zero (padding)."""
        return replace(self, signals=self.signals.masked_fill((self.index == row)[..., None], 0))


@dataclass(frozen=True)
class OutputsEmbeddingTerm(SignalTerm):
    """The gradients of K outputs by embeddings: signals added to rows of K tables for each of S samples.

    Args:
        shape: ``[S, K, V, *columns]``.
        signals: the values that are added to rows, those of all outputs side by side, ``[S, T, K·D]``.
        index: for each value, the row of the sample's tables, ``[S, T]``.
        num_rows: V, the number of rows of one table.
    """

    index: Tensor
    num_rows: int

    def compute(self, dtype: torch.dtype) -> Tensor:
        """Return the tables."""
        return self.factor(dtype).materialize()

    def factor(self, dtype: torch.dtype) -> OutputList:
        """Return the factor of K tables per sample."""
        signals = self.signals.to(dtype).unflatten(2, (self.shape[1], -1)).unbind(2)
        return OutputList(tuple(Embedding(x, self.index, self.shape[2:]) for x in signals))


@dataclass(frozen=True)
class SharedEmbeddingTerm(SignalTerm):
    """The gradient of embeddings with one index for all samples (positions, say), whose columns stand side by side.

    Args:
        shape: the shape of the tensor, ``[V, C]`` or a view of it.
        signals: the values that are added to rows, ``[T, C]``.
        index: for each value, the row of the table, ``[T]``.
    """

    index: Tensor

    def compute(self, dtype: torch.dtype) -> Tensor:
        """Return the table."""
        rows = prod(self.shape) // self.signals.shape[1]
        table = self.signals.new_zeros(rows, self.signals.shape[1], dtype=dtype)
        return table.index_add_(0, self.index, self.signals.to(dtype)).view(self.shape)

    def factor(self, dtype: torch.dtype) -> None:  # noqa: ARG002
        """Return None: the first axis counts rows, not samples."""
        return

    def reshape(self, shape: Sequence[int]) -> SharedEmbeddingTerm | None:
        """Return the table in another shape of as many rows."""
        return replace(self, shape=tuple(shape)) if shape[0] == self.shape[0] else None

    def permute(self, dims: Sequence[int]) -> EmbeddingTerm | None:
        """Return one table per sample, where the axis of the samples moves to the front."""
        if len(dims) != 3 or tuple(dims) != (1, 0, 2):
            return None
        rows, samples, columns = self.shape
        signals = self.signals.view(-1, samples, columns).movedim(1, 0)
        return EmbeddingTerm((samples, rows, columns), signals, self.index.expand(samples, -1), rows)
