"""Gradients of embedding tables: Σₜ e(vₜ) lₜᵀ for each sample. Only the looked-up rows are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from persample.factors.factor import Factor
from persample.factors.outer import Outer
from persample.factors.term_moments import TermMoments
from persample.utils import numerics


@dataclass(frozen=True)
class Embedding(Factor):
    """Per-sample gradients of a table ``[V, *columns]`` that is looked up T times in each sample.

    Examples:
        >>> factor = Embedding(torch.ones(1, 2, 3), torch.tensor([[4, 4]]), (5, 3))
        >>> factor.squared_norms().round()  # one row looked up twice: 2² + 2² + 2²
        tensor([12.], dtype=torch.float64)
    """

    signals: Tensor  # the gradient of every looked-up row, ``[B, T, D]``; of K outputs ``[B, K, T, D]``
    index: Tensor  # the indices of the looked-up rows, ``[B, T]``; of K outputs ``[B, 1, T]``
    table_shape: tuple[int, ...]  # ``[V, *columns]``

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the table, and of those of K outputs."""
        return (*self.outputs, *self.table_shape)

    @property
    def num_terms(self) -> int:
        """T, the number of rows looked up in one sample."""
        return self.index.shape[-1]

    @property
    def _term_axes(self) -> tuple[int, int]:
        return -2, -1

    @property
    def norm_operands(self) -> tuple[Tensor, ...]:
        """The signals, where no row is looked up twice by a sample: T = 1."""
        return (self.signals,) if self.num_terms == 1 else ()

    @property
    def is_product(self) -> bool:
        return False

    @property
    def as_one(self) -> Embedding:
        """The K gradients of each sample as one, of a table with K times as many rows."""
        if not self.outputs:
            return self
        tables = torch.arange(*self.outputs, device=self.index.device).unsqueeze(-1) * self.table_shape[0]
        shape = (self.outputs[0] * self.table_shape[0], *self.table_shape[1:])
        return Embedding(self.signals.flatten(1, 2), (self.index + tables).flatten(1), shape)

    @property
    def first_places(self) -> Tensor:
        """The first of the T places at which a sample looks up the same row, for each place: like ``index``."""
        return (self.index.unsqueeze(-1) == self.index.unsqueeze(-2)).to(torch.uint8).argmax(-1)

    def materialize(self, out: Tensor | None = None) -> Tensor:
        values = self.signals.new_zeros(len(self), *self.shape) if out is None else out.zero_()
        self.add_to(values)
        return values

    def add_to(self, out: Tensor) -> None:
        rows = out.reshape(prod(self.sizes) * self.table_shape[0], self.signals.shape[-1])
        rows.index_add_(0, self._numbers(self.sizes), self.signals.flatten(0, -2).to(out.dtype))
        if numerics.storage_key(rows) != numerics.storage_key(out):
            out.copy_(rows.view(out.shape))

    def _numbers(self, sizes: Sequence[int]) -> Tensor:
        """Return the indices of the looked-up rows in one table for each of some samples and outputs."""
        tables = torch.arange(prod(sizes), device=self.index.device).view(*sizes, 1)
        return (self.index + tables * self.table_shape[0]).flatten()

    @cached_property
    def _distinct(self) -> tuple[Tensor, Tensor]:
        """The sums of the signals of equal rows, ``[B·T, D]``, zeros at the end, and the rows' indices, ``[B·T]``.

        Row v of sample i has the number i·V + v; of output k, (i·K + k)·V + v.
        """
        rows, order = self._numbers(self.sizes).sort()
        first = torch.cat([rows.new_zeros(len(rows[:1])), (rows[1:] != rows[:-1]).long()]).cumsum(0)
        signals = self.signals.flatten(0, -2)[order].to(numerics.accumulate_dtype(self.dtype))
        added = torch.zeros_like(signals).index_add_(0, first, signals)
        return added, rows[-1:].repeat(len(rows)).scatter_(0, first, rows)

    def rotated(self, left: Tensor, right: Tensor) -> Factor:
        """Return the factor of Lᵀ gᵢ R: of a diagonal L, the signals are rotated."""
        if left.ndim > 1 or right.ndim == 1:
            return super().rotated(left, right)
        return replace(self, signals=self.signals.to(left.dtype) @ right * left[self.index].unsqueeze(-1))

    def squared_norms(self) -> Tensor:
        if self.num_terms == 1:  # no row is looked up twice
            return numerics.squared_norms_of_each([self.signals], len(self.sizes))[0]
        added, rows = self._distinct
        total = torch.zeros(self.sizes, dtype=torch.float64, device=added.device)
        total.view(-1).index_add_(0, rows // self.table_shape[0], numerics.squared_norms(added))
        return total

    def term_norms(self) -> Tensor:
        """Return ‖lₜ‖ of each lookup, ``[B, T]``."""
        return numerics.root(numerics.squared_norms_of_each([self.signals], self.signals.ndim - 1)[0])

    def kronecker(self, moments: TermMoments) -> tuple[Tensor, Tensor]:
        """Return how often each row was looked up, ``[V]``, the diagonal of a matrix, and the moment of the signals."""
        dtype = numerics.accumulate_dtype(self.dtype)
        counts = self._counts(dtype, moments.filled)
        total = counts.second_moment if moments.sums_terms else counts.weighted_sum
        of_signals = moments.of(self.signals.unsqueeze(-3), "right", self.outputs, dtype)
        return total(moments.weights, dtype).flatten() * prod(self.outputs), of_signals

    def _counts(self, dtype: torch.dtype, filled: Tensor | None) -> Embedding:
        """Return the factor of how often each sample looks up each row, ``[V, 1]``; padding, at the end, not at all."""
        index = self.index.flatten(1)
        ones = torch.ones(index.shape, dtype=dtype, device=index.device)
        if filled is not None:
            ones = ones.cumsum(1).le((filled * self.num_terms).round().unsqueeze(1)).to(dtype)
        return Embedding(ones.unsqueeze(-1), index, (self.table_shape[0], 1))

    def summed_terms(self, filled: Tensor | None) -> Outer:
        """Return the product of the sums over the terms: of the rows looked up, as counts, and of the signals."""
        dtype = numerics.accumulate_dtype(self.dtype)
        signals = self.signals.sum(-2, keepdim=True, dtype=dtype).unsqueeze(-3)
        counts = self._counts(dtype, filled).materialize()
        counts = counts.view(len(self), *[1] * (signals.ndim - 2), self.table_shape[0])
        return Outer(counts, signals, self.table_shape, dtype, outputs=self.outputs)

    def own_gram(self) -> Tensor:
        if not self.outputs or not self.num_terms:
            return super().own_gram()
        signals = self.signals.to(numerics.accumulate_dtype(self.dtype))
        places = self.first_places.unsqueeze(-1).expand_as(signals)
        rows = torch.zeros_like(signals).scatter_add_(2, places, signals).flatten(2)
        return rows @ rows.mT

    def weighted_sum(self, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        signals = self.signals.to(dtype) if weights is None else numerics.scaled_rows(self.signals, weights, dtype)
        table = torch.zeros(self.shape, dtype=dtype, device=signals.device)
        rows = self._numbers((1, *self.outputs)) if self.outputs else self.index.flatten()
        table.view(-1, signals.shape[-1]).index_add_(0, rows, signals.flatten(0, -2))
        return table

    def second_moment(self, weights: Tensor | None, dtype: torch.dtype, center: Tensor | None = None) -> Tensor:
        """Return Σ wᵢ (gᵢ − center)², elementwise ``[*shape]``; rows that were not looked up deviate by ``center``."""
        added, rows = self._distinct
        each = torch.ones(len(self), dtype=dtype, device=added.device) if weights is None else weights.to(dtype)
        height = prod(self.outputs) * self.table_shape[0]
        sample, row = rows // height, rows % height
        values, scale = added.to(dtype), each[sample][:, None]
        table = torch.zeros(height, values.shape[1], dtype=dtype, device=added.device)
        if center is None:
            return table.index_add_(0, row, values.square() * scale).view(self.shape)
        middle = center.to(dtype).reshape(table.shape)
        deviation = (values - middle[row]).square() - middle[row].square()
        return (middle.square() * each.sum()).index_add_(0, row, deviation * scale).view(self.shape)

    @property
    def has_rows(self) -> bool:
        return True

    def gram(self, other: Factor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return ⟨gᵢ, hⱼ⟩, ``[B, B']``, over the rows looked up in g."""
        mine = self.some_rows(self._used_rows)
        return mine.gram_by_rows(mine if other is None else other.some_rows(self._used_rows), dtype)

    @cached_property
    def _used_rows(self) -> Tensor:
        """Sorted rows of the table, among them all that were looked up."""
        if self.index.device.type == "cpu":
            return self.index.unique()
        # Their number is a value. Without it, rows may be repeated, or not be looked up.
        whole = torch.arange(self.table_shape[0], device=self.index.device)
        return whole if len(whole) <= self.index.numel() else self.index.flatten().sort().values

    def some_rows(self, index: Tensor) -> Embedding:
        """Return the factor of some rows of the parameter; of a repeated index, the first entry has the gradient."""
        known = torch.searchsorted(index, self.index.contiguous()).clamp_max(len(index) - 1)
        signals = torch.where((index[known] == self.index)[..., None], self.signals, 0)
        return replace(self, signals=signals, index=known, table_shape=(len(index), signals.shape[-1]))

    def dot(self, directions: Tensor) -> Tensor:
        signals = self.signals.to(numerics.accumulate_dtype(self.dtype))
        tables = directions.to(signals.dtype).reshape(len(directions), self.table_shape[0], -1)
        return torch.stack([(signals * table[self.index]).sum((-2, -1)) for table in tables], -1)

    def projected_terms(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return the signs of the looked-up rows, and the products of signals with signs."""
        signals = self.signals.to(numerics.accumulate_dtype(self.dtype))
        return left.to(signals.dtype).T[self.index], signals @ right.to(signals.dtype).T

    @classmethod
    def concatenate(cls, factors: Sequence[Embedding]) -> Embedding:
        """Return the factor of the samples of all, padded with zero signals at row 0."""
        num_terms = max(factor.num_terms for factor in factors)
        signals = torch.cat([pad(factor.signals, (0, 0, 0, num_terms - factor.num_terms)) for factor in factors])
        index = torch.cat([pad(factor.index, (0, num_terms - factor.num_terms)) for factor in factors])
        return replace(factors[0], signals=signals, index=index)

    def add(self, other: Factor) -> Embedding | None:
        """Return the factor of gᵢ + hᵢ: a table with more lookups."""
        if not isinstance(other, Embedding):
            return None
        signals, index = torch.cat([self.signals, other.signals], -2), torch.cat([self.index, other.index], -1)
        return replace(self, signals=signals, index=index)
