"""The interface between reductions and the forms in which a parameter's per-sample gradients are stored.

``Dense``, gradients written out in full, is the factor that every parameter can fall back to.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from persample.factors import contractions, cost_model
from persample.factors.term_moments import TermMoments
from persample.utils import numerics, tracing
from persample.utils.trees import Tree

F = TypeVar("F", bound="Factor")
M = TypeVar("M", bound="Mapped")


@dataclass(frozen=True)
class Factor(ABC):
    """The gradients g₁ … g_B of one parameter of shape ``shape``; complex parameters count as pairs of reals.

    A kind of factor is a frozen dataclass. Its tensor fields have one row per sample, and the gradients are linear in
    the first of them. A new kind defines ``shape`` and ``materialize``, and overrides what it can do better: the
    defaults write the gradients out, a few samples at a time.

    Of losses with K outputs, each sample has K gradients, stacked in one of shape ``[K, *shape]``. The second axis of a
    tensor field is then that of the outputs: of size K in signals, and of size 1 in what the outputs share, as layers'
    inputs. Sums are over samples, ``[K, *shape]``; norms and products are those of each output, and ``[B]`` below is
    ``[B, K]``.

    ``weights`` below are ``[B]`` float64, or None for ones.

    Args:
        outputs: ``(K,)`` of losses with K outputs, or ``()``.
    """

    outputs: tuple[int, ...] = field(default=(), kw_only=True)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of one gradient, ``[K, *shape]`` of K outputs."""

    @abstractmethod
    def materialize(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients, ``[B, *shape]``, written into ``out`` where it is given."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """``(B,)``, or ``(B, K)``."""
        return (len(self), *self.outputs)

    @property
    def by_output(self: F) -> F:
        """The same gradients as those of B·K samples: row i·K + k is that of output k of sample i."""
        return self.with_tensors([x.flatten(0, 1) for x in self._of_each_output], ()) if self.outputs else self

    @property
    def of_outputs(self: F) -> list[F]:
        """The gradients of each output, without copies."""
        if not self.outputs:
            return [self]
        each = zip(*(x.unbind(1) for x in self._of_each_output), strict=True)
        return [self.with_tensors(tensors, ()) for tensors in each]

    @property
    def _of_each_output(self) -> list[Tensor]:
        """The tensor fields, ``[B, K, …]``: what the outputs share is repeated, without copies."""
        return [x.expand(*self.sizes, *x.shape[2:]) for x in self.tensors]

    @property
    def as_one(self) -> Factor:
        """The K gradients of each sample as one, K times as large; its elements in the order that ``order`` names."""
        return Dense(self.materialize()) if self.outputs else self

    @property
    def order(self) -> tuple[object, ...]:
        """What factors of one kind must share so that the elements of ``as_one`` are in the same order."""
        return ()

    def joined(self, found: Sequence[Tensor]) -> Tensor:
        """Return ``[B]`` of each output as ``[B, K]``."""
        return torch.stack(tuple(found), 1) if self.outputs else found[0]

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensor fields."""
        return tuple(tensor_fields(self).values())

    @property
    def dtype(self) -> torch.dtype:
        """The real dtype of the gradients."""
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of the gradients."""
        return self.tensors[0].device

    @property
    def num_terms(self) -> int:
        """T, the number of products whose sum is one gradient; 1 for other gradients."""
        return 1

    @property
    def stored(self) -> int:
        """The number of elements stored, for all samples together."""
        return sum(map(Tensor.numel, self.tensors))

    @property
    def size(self) -> cost_model.Size:
        """The sizes by which the cost model estimates times."""
        written = len(self) * prod(self.shape)
        return cost_model.Size(self.num_terms, written, self.stored, self.device.type)

    def reason_to_write_out(self, plan: cost_model.Plan) -> str:
        """Return why the gradients are to be written out, or "" where the factor stays."""
        if plan.always_keeps(self.num_terms):  # the usual case, without its sizes
            return ""
        return plan.reason_to_write_out(self.size, is_product=self.is_product)

    @property
    def is_product(self) -> bool:
        """Whether writing a gradient out takes matrix products."""
        return True

    @property
    def has_rows(self) -> bool:
        """Whether ``some_rows`` writes nothing out."""
        return False

    @property
    def product_operands(self) -> tuple[Tensor, ...]:
        """Tensors ``[B, ...]`` whose inner products multiply to those of the gradients; empty for other factors."""
        return ()

    @property
    def norm_operands(self) -> tuple[Tensor, ...]:
        """Tensors ``[B, ...]`` whose squared norms multiply to those of the gradients; empty for other factors."""
        return self.product_operands

    @property
    def term_operands(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Signals and inputs of each output, ``[B, G, T, …]``, where norms are computed from the products of terms."""
        return ()

    def __len__(self) -> int:
        """Return B."""
        return self.tensors[0].shape[0]  # len of a tensor takes 2 µs

    def with_tensors(self: F, tensors: Iterable[Tensor], outputs: tuple[int, ...] | None = None) -> F:
        """Return a factor of other tensors, in the order of ``tensors``, and perhaps of other outputs."""
        named: dict[str, Any] = dict(zip(tensor_fields(self), tensors, strict=True))
        return replace(self, **named, outputs=self.outputs if outputs is None else outputs)

    def rows(self: F, index: slice | Tensor) -> F:
        """Return the factor of some of the samples."""
        return self.with_tensors([x[index] for x in self.tensors])

    def to(self: F, device: torch.device) -> F:
        """Return the factor on a device."""
        return self.with_tensors([x.to(device) for x in self.tensors])

    def zero_rows(self: F, rows: Tensor) -> F:
        """Return the factor whose gradients are exactly zero where the bool mask ``rows [B]`` holds, NaN or not."""
        masks = ((x, contractions.per_row(rows, x)) for x in self.tensors)
        return self.with_tensors([x.masked_fill(mask, 0) if x.is_floating_point() else x for x, mask in masks])

    def scale_rows(self, scale: Tensor) -> Factor:
        """Return the factor of sᵢ gᵢ for ``scale [B]`` float64, or ``[B, K]`` of K outputs, in float32 at least."""
        first, *others = self.tensors
        scaled = first.double() * contractions.per_row(scale, first)
        return self.with_tensors([scaled.to(numerics.accumulate_dtype(self.dtype)), *others])

    def scale_outputs(self: F, scale: Tensor, dtype: torch.dtype) -> F:
        """Return the factor of sₖ gₖ for ``scale [B, K]``: the tensor that differs among outputs is scaled."""
        tensors = list(self.tensors)
        place = max(range(len(tensors)), key=lambda k: tensors[k].shape[1])
        tensors[place] = numerics.scaled_rows(tensors[place], scale, dtype)
        return self.with_tensors(tensors)

    def add_to(self, out: Tensor) -> None:
        """Add the gradients to ``out [B, *shape]``."""
        out.add_(self.materialize())

    def spread(self: F, places: Tensor, rows: int) -> F:
        """Return the factor of ``rows`` samples, the gradients at places ``[B]``, and zeros elsewhere."""
        return self.with_tensors([contractions.spread(x, places, rows) for x in self.tensors])

    def times_elements(self, scale: Tensor) -> Factor:
        """Return the factor of s ⊙ gᵢ for ``scale`` of the shape of one gradient, in float32 at least."""
        return Scaled(self, scale.to(numerics.accumulate_dtype(self.dtype)), outputs=self.outputs)

    def times_rank_one(self, rows: Tensor, columns: Tensor) -> Factor:
        """Return the factor of s ⊙ gᵢ for s = rows columnsᵀ, ``rows [o]`` and ``columns [*rest]``."""
        return self.times_elements(rows.view(-1, *[1] * columns.ndim) * columns)

    def rotated(self, left: Tensor, right: Tensor) -> Factor:
        """Return the factor of Lᵀ gᵢ R, gᵢ seen as ``[o, i]``, or G of them, in the dtype of L and R.

        L is ``[o, o]``, ``[G, o, o]``, or a vector ``[o]``, the diagonal of a matrix; so is R.
        """
        return Rotated(self, left, right, outputs=self.outputs)

    def times(self, scale: float) -> Factor:
        """Return the factor of s gᵢ, in float32 at least."""
        if numerics.accumulate_dtype(self.dtype) != self.dtype:
            return self.scale_rows(self.tensors[0].new_full(self.sizes, scale, dtype=torch.float64))
        first, *others = self.tensors
        return self.with_tensors([first * scale, *others])

    def joined_rows(self, count: int) -> Factor:
        """Return the factor of the sums of ``count`` consecutive gradients each: their terms, side by side."""
        places = zip(self.tensors, self._term_axes, strict=True)
        return self.with_tensors([contractions.terms_of_rows(x, count, axis) for x, axis in places])

    @property
    def _term_axes(self) -> Sequence[int]:
        """The axis of each tensor along which the terms lie whose sum is one gradient."""
        raise NotImplementedError

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖², ``[B]`` float64."""
        return self._of_blocks(numerics.squared_norms)

    def term_norms(self) -> Tensor | None:
        """Return the norm of each of the T terms whose sum is one gradient, ``[B, T]``; None without terms."""
        return None

    def kronecker(self, moments: TermMoments) -> tuple[Tensor, Tensor] | None:  # noqa: ARG002
        """Return the second moments of the terms along the first axis and along the others; None without terms."""
        return None

    def weighted_sum(self, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return Σ wᵢ gᵢ, ``[*shape]``, accumulated in ``dtype``; of K outputs, weights may be ``[B, K]``."""
        return _total(contractions.weighted_sum(x, _at(weights, index), dtype) for index, x in self._blocks())

    def second_moment(self, weights: Tensor | None, dtype: torch.dtype, center: Tensor | None = None) -> Tensor:
        """Return Σ wᵢ (gᵢ − center)², elementwise ``[*shape]``, accumulated in ``dtype``."""
        return _total(contractions.second_moment(x, _at(weights, index), dtype, center) for index, x in self._blocks())

    def gram(self, other: Factor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return ⟨gᵢ, hⱼ⟩, ``[B, B']``, in ``dtype``, or else float32 at least; without ``other`` the own Gram matrix.

        Of K outputs, and of K' in ``other``: ``[B, K, B', K']``, ``[B, K, B']`` or ``[B, B', K']``. By default the
        gradients of ``other`` are written out whole, and those of this factor in blocks.
        """
        other = self if other is None else other
        others = other.rows_of(other.materialize())
        if other is self:
            products = contractions.gram(others, others, dtype)
        else:
            products = self._of_blocks(lambda rows: contractions.gram(rows, others, dtype))
        return products.view(*self.sizes, *other.sizes)

    def trace_gram(self, other: Factor | None = None) -> Tensor:
        """Return Σₖ ⟨gᵢₖ, hⱼₖ⟩ over the outputs, ``[B, B']``; without ``other`` of the own gradients."""
        if other is None:
            return self.as_one.gram()
        if (type(self), self.order) == (type(other), other.order):
            return self.as_one.gram(other.as_one)
        return Dense(self.materialize()).gram(Dense(other.materialize()))

    def own_gram(self) -> Tensor:
        """Return ⟨gᵢₖ, gᵢₗ⟩ of the outputs of each sample, ``[B, K, K]``, in float32 at least; of one, ``[B]``."""
        if not self.outputs:
            return self.squared_norms()
        dtype = numerics.accumulate_dtype(self.dtype)
        rows = (block.unsqueeze(-1).flatten(2).to(dtype) for _, block in self._blocks())
        return _concatenated(x @ x.mT for x in rows)

    def gram_by_rows(self, other: Factor, dtype: torch.dtype | None) -> Tensor:
        """Return ⟨gᵢ, hⱼ⟩, with a few rows of the parameter written out at a time, for all samples."""
        height, *columns = self.shape[len(self.outputs) :]
        each = max(prod(factor.sizes) for factor in (self, other)) * prod(columns)
        step = cost_model.rows_per_block(height, each, self.device, num_blocks=4)

        def written(factor: Factor, index: Tensor) -> Tensor:
            return factor.rows_of((factor if step >= height else factor.some_rows(index)).materialize())

        def products(index: Tensor) -> Tensor:
            mine = written(self, index)
            return contractions.gram(mine, mine if other is self else written(other, index), dtype)

        blocks = map(products, torch.arange(height, device=self.device).split(step))
        return functools.reduce(torch.add, blocks).view(*self.sizes, *other.sizes)

    def some_rows(self, index: Tensor) -> Factor:
        """Return the factor of some rows of the parameter, seen as a matrix, at sorted indices."""
        values = self.materialize().flatten(len(self.sizes) + 1)
        return Dense(values[..., index, :], outputs=self.outputs)

    def dot(self, directions: Tensor) -> Tensor:
        """Return ⟨gᵢ, dⱼ⟩, ``[B, D]``, for ``directions [D, *shape]``, in float32 at least."""
        directions = directions.to(numerics.accumulate_dtype(self.dtype))
        return self._of_blocks(lambda rows: contractions.gram(rows, directions))

    def projected_terms(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor] | None:  # noqa: ARG002
        """Return the products of signals and of inputs with signs, ``[B, T, D]`` and ``[B, T, D']``; else None.

        In float32 at least; of K outputs ``[B, K, T, D]``, or ``[B, 1, T, D]`` where these share them.
        """
        return None

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ``left[j]ᵀ gᵢ right[j]``, ``[B, D]``, gᵢ seen as ``[o, rest]``, for ``[D, o]`` and ``[D, rest]``."""
        terms = self.projected_terms(left, right)
        if terms is None:
            return self._of_blocks(lambda rows: contractions.project(rows, left, right))
        return contractions.summed(terms[0] * terms[1], -2)

    def sketch(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ``left gᵢ rightᵀ``, ``[B, D, D']``, gᵢ seen as ``[o, rest]``, for ``[D, o]`` and ``[D', rest]``."""
        terms = self.projected_terms(left, right)
        if terms is None:
            return self._of_blocks(lambda rows: contractions.sketch(rows, left, right))
        left, right = terms
        return left.mT * right if left.shape[-2] == 1 else left.mT @ right

    @classmethod
    def concatenate(cls: type[F], factors: Sequence[F]) -> Factor | None:
        """Return the factor of the samples of all, or None where they do not fit together."""
        if len({row_format(factor) for factor in factors}) > 1:
            return None
        operands = zip(*(factor.tensors for factor in factors), strict=True)
        return factors[0].with_tensors([torch.cat(rows) for rows in operands])

    def add(self, other: Factor) -> Factor | None:  # noqa: ARG002
        """Return the factor of gᵢ + hᵢ, or None where one of this kind does not hold it."""
        return None

    def rows_of(self, values: Tensor) -> Tensor:
        """Return values ``[B, …]`` unchanged, and those of K outputs, ``[B, K, …]``, with B·K rows."""
        return values.flatten(0, 1) if self.outputs else values

    def _of_blocks(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what a function computes of rows of gradients, a few samples at a time, ``[B, …]``."""
        found = _concatenated(function(self.rows_of(block)) for _, block in self._blocks())
        return found.unflatten(0, self.sizes) if self.outputs else found

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the gradients of a few samples at a time, in one buffer: a block is valid until the next one."""
        size, step = len(self), cost_model.rows_per_block(len(self), prod(self.shape), self.device)
        buffer: Tensor | None = None
        for start in range(0, max(size, 1), step):
            index = slice(start, min(start + step, size))
            reused = None if buffer is None or tracing.is_for_compiler(buffer) else buffer[: index.stop - start]
            buffer = self.rows(index).materialize(reused)
            yield index, buffer


def tensor_fields(x: Tree) -> dict[str, Tensor]:
    """Return the fields of a dataclass that are tensors, by name."""
    return {name: value for name in _names(x.__class__) if isinstance(value := getattr(x, name), Tensor)}


@functools.cache
def _names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


def row_format(factor: Factor) -> tuple[object, ...]:
    """Return the properties that factors must share to be stacked: the shapes of their rows, and all other fields."""
    values = (getattr(factor, field.name) for field in fields(factor))
    return tuple(x.shape[1:] if isinstance(x, Tensor) else x for x in values)


def _at(weights: Tensor | None, index: slice) -> Tensor | None:
    return None if weights is None else weights[index]


def _concatenated(blocks: Iterable[Tensor]) -> Tensor:
    first, *others = blocks
    return torch.cat([first, *others]) if others else first


def _total(blocks: Iterable[Tensor]) -> Tensor:
    return functools.reduce(Tensor.add_, blocks)


@dataclass(frozen=True)
class Dense(Factor):
    """Per-sample gradients stored as one tensor.

    Examples:
        >>> Dense(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).squared_norms()
        tensor([25.,  1.], dtype=torch.float64)
    """

    values: Tensor  # the gradients, real, ``[B, *shape]``, of K outputs ``[B, K, *shape]``

    @classmethod
    def zeros(cls, sizes: Sequence[int], like: Tensor) -> Dense:
        """Return the zero gradients of an unused parameter, stored once."""
        return cls(torch.zeros_like(like).expand(*sizes, *like.shape), outputs=tuple(sizes[1:]))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape[1:])

    @property
    def product_operands(self) -> tuple[Tensor, ...]:
        """The gradients."""
        return (self.values,)

    def materialize(self, out: Tensor | None = None) -> Tensor:
        return self.values if out is None else out.copy_(self.values)

    def add(self, other: Factor) -> Dense:
        """Return the factor of gᵢ + hᵢ, written out."""
        if isinstance(other, Dense):
            return replace(self, values=self.values + other.values)
        values = self.values.clone(memory_format=torch.contiguous_format)
        other.add_to(values)
        return replace(self, values=values)

    def times_elements(self, scale: Tensor) -> Dense:
        return replace(self, values=self.values * scale.to(numerics.accumulate_dtype(self.dtype)))

    def joined_rows(self, count: int) -> Dense:
        """Return the factor of the sums of ``count`` consecutive gradients each, in float32 at least."""
        dtype = numerics.accumulate_dtype(self.dtype)
        if len(self) and self.values.stride()[0] == 0:  # one row for all, as that of an unused parameter
            return replace(self, values=(self.values[:1] * count).expand(len(self) // count, *self.shape))
        return replace(self, values=contractions.split_rows(self.values, count).sum(1, dtype=dtype))

    def spread(self, places: Tensor, rows: int) -> Dense:
        if len(self) and tracing.are_plain([self.values]) and is_zeros(self):
            return replace(self, values=self.values[:1].expand(rows, *self.shape))
        return super().spread(places, rows)

    def weighted_sum(self, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        return contractions.weighted_sum(self.values, weights, dtype)

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        yield slice(None), self.values


@dataclass(frozen=True)
class Mapped(Factor):
    """Gradients that are a linear function of those of another factor, written out a few samples at a time."""

    factor: Factor

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the other factor."""
        return self.factor.tensors

    @property
    def shape(self) -> tuple[int, ...]:
        return self.factor.shape

    @property
    def num_terms(self) -> int:
        """T of the other factor."""
        return self.factor.num_terms

    def with_tensors(self: M, tensors: Iterable[Tensor], outputs: tuple[int, ...] | None = None) -> M:
        factor = self.factor.with_tensors(tensors, outputs)
        return replace(self, factor=factor, outputs=factor.outputs)

    def scale_rows(self: M, scale: Tensor) -> M:
        """Return the factor of sᵢ gᵢ: the other factor is scaled, whose parts may be a sum."""
        return replace(self, factor=self.factor.scale_rows(scale))

    @classmethod
    def concatenate(cls: type[M], factors: Sequence[M]) -> M:
        """Return the factor of the samples of all, which have one function."""
        return replace(factors[0], factor=concatenate([one.factor for one in factors]))


@dataclass(frozen=True)
class Scaled(Mapped):
    """The gradients of another factor times s, elementwise; s is of the shape of one, without the axis of outputs."""

    scale: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.scale.dtype

    def materialize(self, out: Tensor | None = None) -> Tensor:
        values = self.factor.materialize() * self.scale
        return values if out is None else out.copy_(values)


@dataclass(frozen=True)
class Rotated(Mapped):
    """The gradients Lᵀ gᵢ R of another factor, as in ``Factor.rotated``."""

    left: Tensor
    right: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    def materialize(self, out: Tensor | None = None) -> Tensor:
        values = self.factor.materialize().to(self.dtype)
        block = (*self.left.shape[:-2], self.left.shape[-1], self.right.shape[-1])
        rotated = contractions.between(self.left, values.reshape(*self.sizes, *block), self.right).view(values.shape)
        return rotated if out is None else out.copy_(rotated)


def concatenate(factors: Sequence[Factor]) -> Factor:
    """Return one factor for the samples of all. Unlike kinds are written out."""
    kinds = {type(factor) for factor in factors}
    joined = kinds.pop().concatenate(factors) if len(kinds) == 1 else None
    if joined is not None:
        return joined
    return Dense(torch.cat([factor.materialize() for factor in factors]), outputs=factors[0].outputs)


def is_zeros(factor: Factor) -> bool:
    """Return whether a factor is that of an unused parameter, as ``Dense.zeros`` returns it."""
    return isinstance(factor, Dense) and not any(factor.values.stride()[:1]) and not bool(factor.values.any())
