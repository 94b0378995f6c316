"""Gradients of a parameter that is used in several ways: the sum of unlike factors, cross terms included."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from persample.factors.embedding import Embedding
from persample.factors.factor import Factor, concatenate
from persample.factors.outer import Outer
from persample.factors.term_moments import TermMoments, with_diagonal
from persample.utils import numerics


@dataclass(frozen=True)
class SumFactor(Factor):
    """Per-sample gradients that are the sum of the gradients of several factors of one shape.

    Linear operations add up the results of the parts. Norms, inner products and second moments write out where parts
    meet, as these may nearly cancel.

    Examples:
        >>> from persample.factors.factor import Dense
        >>> SumFactor((Dense(torch.ones(1, 2)), Dense(torch.ones(1, 2)))).materialize()
        tensor([[2., 2.]])
    """

    parts: tuple[Factor, ...]  # the factors, no two of which ``add`` to one factor

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of all parts."""
        return tuple(x for part in self.parts for x in part.tensors)

    @property
    def dtype(self) -> torch.dtype:
        return functools.reduce(torch.promote_types, (part.dtype for part in self.parts))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape

    @property
    def num_terms(self) -> int:
        """T, over all parts."""
        return sum(part.num_terms for part in self.parts)

    @property
    def is_product(self) -> bool:
        return any(part.is_product for part in self.parts)

    @property
    def has_rows(self) -> bool:
        return all(part.has_rows for part in self.parts)

    @property
    def as_one(self) -> Factor:
        """The K gradients of each sample as one, where the parts have the same rows."""
        if not self.outputs:
            return self
        parts = tuple(part.as_one for part in self.parts)
        alike = all(part.has_rows for part in parts) and len({part.shape for part in parts}) == 1
        return SumFactor(parts) if alike else super().as_one

    def with_tensors(self, tensors: Iterable[Tensor], outputs: tuple[int, ...] | None = None) -> SumFactor:
        given = iter(tensors)
        parts = tuple(part.with_tensors(islice(given, len(part.tensors)), outputs) for part in self.parts)
        return SumFactor(parts, outputs=parts[0].outputs)

    def materialize(self, out: Tensor | None = None) -> Tensor:
        first, *others = self.parts
        if out is None:
            out = torch.empty(len(self), *self.shape, dtype=self.dtype, device=self.device)
        first.materialize(out)
        for part in others:
            part.add_to(out)
        return out

    def add_to(self, out: Tensor) -> None:
        for part in self.parts:
            part.add_to(out)

    def scale_rows(self, scale: Tensor) -> SumFactor:
        """Return the factor of sᵢ gᵢ for ``scale [B]``, in float32 at least."""
        return replace(self, parts=tuple(part.scale_rows(scale) for part in self.parts))

    def times_rank_one(self, rows: Tensor, columns: Tensor) -> Factor:
        if not self.has_rows or not all(isinstance(part, Outer) for part in self.parts):
            return super().times_rank_one(rows, columns)
        return replace(self, parts=tuple(part.times_rank_one(rows, columns) for part in self.parts))

    def rotated(self, left: Tensor, right: Tensor) -> SumFactor:
        return replace(self, parts=tuple(part.rotated(left, right) for part in self.parts))

    def times(self, scale: float) -> SumFactor:
        return replace(self, parts=tuple(part.times(scale) for part in self.parts))

    def joined_rows(self, count: int) -> SumFactor:
        return replace(self, parts=tuple(part.joined_rows(count) for part in self.parts))

    def weighted_sum(self, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        return _added(part.weighted_sum(weights, dtype) for part in self.parts)

    def squared_norms(self) -> Tensor:
        heads = [part for part in self.parts if isinstance(part, Outer) and part.has_rows]
        tables = [part for part in self.parts if isinstance(part, Embedding)]
        both = len(self.parts) == 2 and heads and tables and not self.outputs
        if both and heads[0].needs_no_writing and tables[0].num_terms:
            return _squared_norms_of_both(heads[0], tables[0])
        return super().squared_norms()

    def term_norms(self) -> Tensor | None:
        """Return the norm of each term, those of one part after those of another."""
        found = [norms for part in self.parts if (norms := part.term_norms()) is not None]
        return torch.cat(found, -1) if len(found) == len(self.parts) else None

    def kronecker(self, moments: TermMoments) -> tuple[Tensor, Tensor] | None:
        """Return the second moments of the terms of all parts; None where one has no terms, or other blocks."""
        if not all(isinstance(part, Outer | Embedding) and part.has_rows for part in self.parts):
            return None
        if not moments.sums_terms:
            pairs = [part.kronecker(moments) for part in self.parts]
            left, right = (functools.reduce(with_diagonal, side) for side in zip(*filter(None, pairs), strict=True))
            return left, right
        sums = [part.summed_terms(moments.filled) for part in self.parts if isinstance(part, Outer | Embedding)]
        left, right = (_added(getattr(one, side) for one in sums) for side in ("left", "right"))
        return replace(sums[0], left=left, right=right).kronecker(moments)

    def gram(self, other: Factor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return ⟨gᵢ, hⱼ⟩, ``[B, B']``, with a few rows of the parameter written out at a time."""
        # Not of parts with parts: where these nearly cancel, as those of a softmax and its label do, no digit is left.
        other = self if other is None else other
        return self.gram_by_rows(other, dtype) if self.has_rows and other.has_rows else super().gram(other, dtype)

    def some_rows(self, index: Tensor) -> SumFactor:
        return replace(self, parts=tuple(part.some_rows(index) for part in self.parts))

    def dot(self, directions: Tensor) -> Tensor:
        return _added(part.dot(directions) for part in self.parts)

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        return _added(part.project(left, right) for part in self.parts)

    def sketch(self, left: Tensor, right: Tensor) -> Tensor:
        return _added(part.sketch(left, right) for part in self.parts)

    @classmethod
    def concatenate(cls, factors: Sequence[SumFactor]) -> SumFactor | None:
        """Return the factor of the samples of all, where they have the same number of parts."""
        if len({len(factor.parts) for factor in factors}) > 1:
            return None
        parts = tuple(concatenate(parts) for parts in zip(*(factor.parts for factor in factors), strict=True))
        return replace(factors[0], parts=parts)


def sum_factors(factors: Iterable[Factor]) -> Factor:
    """Return the sum of factors of one parameter; factors of one kind are added to one factor where they can be."""
    parts: list[Factor] = []
    for factor in factors:
        for place, part in enumerate(parts):
            merged = part.add(factor)
            merged = factor.add(part) if merged is None else merged
            if merged is not None:
                parts[place] = merged
                break
        else:
            parts.append(factor)
    return parts[0] if len(parts) == 1 else SumFactor(tuple(parts), outputs=parts[0].outputs)


def _squared_norms_of_both(head: Outer, table: Embedding) -> Tensor:
    """Return ‖gᵢ + hᵢ‖², ``[B]`` float64, of products gᵢ, and of lookups hᵢ in the same table.

    The rows that were looked up are written out, as products and lookups may nearly cancel there; of the others the
    products alone remain.
    """
    index, (left, right) = table.index, (head.left[:, 0], head.right[:, 0])
    places = index[:, None].expand(-1, left.shape[1], -1)
    others = replace(head, left=left.scatter(2, places, 0)[:, None])
    dtype = numerics.accumulate_dtype(torch.promote_types(head.dtype, table.dtype))
    products = left.gather(2, places).to(dtype).mT @ right.to(dtype)
    # A row that is looked up several times counts once, at its first place, with the sum of its signals.
    first = table.first_places
    lookups = torch.zeros_like(products).scatter_add_(1, first[..., None].expand_as(products), table.signals.to(dtype))
    squares = numerics.squared_norms((products + lookups).flatten(0, 1)).view(index.shape)
    is_first = first == torch.arange(index.shape[1], device=index.device)
    return others.squared_norms() + torch.where(is_first, squares, 0).sum(1)


def _added(tensors: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, tensors)
