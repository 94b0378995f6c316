"""The interface between reductions and the forms in which a parameter's per-sample gradients are stored."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from persample.factors import contractions, cost_model
from persample.utils import dtypes, norms, tracing

F = TypeVar("F", bound="Factor")


@dataclass(frozen=True)
class Factor(ABC):
    """The gradients g₁ … g_B of one parameter of shape ``shape``; complex parameters count as pairs of reals.

    A kind of factor is a frozen dataclass. Its tensor fields have one row per sample, and the gradients are linear in
    the first of them. A new kind defines ``shape`` and ``materialize``, and overrides what it can do better: the
    defaults write the gradients out, a few samples at a time.

    ``weights`` below are ``[B]`` float64, or None for ones.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of one gradient."""

    @abstractmethod
    def materialize(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients, ``[B, *shape]``, written into ``out`` where it is given."""

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
        """T, the number of products that one gradient is the sum of; 1 where it is no such sum."""
        return 1

    @property
    def stored(self) -> int:
        """The number of elements stored, for all samples together."""
        return sum(x.numel() for x in self.tensors)

    @property
    def operands(self) -> int:
        """The number of elements that products of this factor read, for all samples together."""
        return self.stored

    @property
    def size(self) -> cost_model.Size:
        """The sizes by which the cost model estimates times."""
        written = len(self) * prod(self.shape)
        return cost_model.Size(self.num_terms, written, self.stored, self.device.type, self.operands)

    @property
    def is_product(self) -> bool:
        """Whether writing a gradient out takes matrix products."""
        return True

    @property
    def norm_operands(self) -> tuple[Tensor, ...]:
        """Tensors ``[B, ...]`` whose squared norms multiply to those of the gradients; none if there are no such."""
        return ()

    @property
    def term_operands(self) -> tuple[Tensor, Tensor] | None:
        """Signals and inputs, ``[B, G, T, …]``, where norms are computed from the inner products of terms."""
        return None

    def __len__(self) -> int:
        """Return B."""
        return self.tensors[0].shape[0]  # len of a tensor takes 2 µs

    def rows(self: F, index: slice | Tensor) -> F:
        """Return the factor of some of the samples."""
        return with_tensors(self, [x[index] for x in self.tensors])

    def to(self: F, device: torch.device) -> F:
        """Return the factor on a device."""
        return with_tensors(self, [x.to(device) for x in self.tensors])

    def zero_rows(self: F, rows: Tensor) -> F:
        """Return the factor whose gradients are exactly zero where the bool mask ``rows [B]`` holds, NaN or not."""
        masks = ((x, contractions.per_sample(rows, x)) for x in self.tensors)
        return with_tensors(self, [x.masked_fill(mask, 0) if x.is_floating_point() else x for x, mask in masks])

    def scale_rows(self, scale: Tensor) -> Factor:
        """Return the factor of sᵢ gᵢ for ``scale [B]`` float64, in float32 at least."""
        first, *others = self.tensors
        scaled = first.double() * contractions.per_sample(scale, first)
        return with_tensors(self, [scaled.to(dtypes.accumulate_dtype(self.dtype)), *others])

    def add_to(self, out: Tensor) -> None:
        """Add the gradients to ``out [B, *shape]``."""
        out.add_(self.materialize())

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖², ``[B]`` float64."""
        return _concatenated(norms.squared_norms(block) for _, block in self._blocks())

    def weighted_sum(self, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return Σ wᵢ gᵢ, ``[*shape]``, accumulated in ``dtype``."""
        return _total(contractions.weighted_sum(x, _at(weights, index), dtype) for index, x in self._blocks())

    def second_moment(self, weights: Tensor | None, dtype: torch.dtype, center: Tensor | None = None) -> Tensor:
        """Return Σ wᵢ (gᵢ − center)², elementwise ``[*shape]``, accumulated in ``dtype``."""
        return _total(contractions.second_moment(x, _at(weights, index), dtype, center) for index, x in self._blocks())

    def gram(self, other: Factor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return ⟨gᵢ, hⱼ⟩, ``[B, B']``, in ``dtype``, or else float32 at least; without ``other`` the own Gram matrix.

        By default the gradients of ``other`` are written out whole, and those of this factor in blocks.
        """
        if other is None:
            values = self.materialize()
            return contractions.gram(values, values, dtype)
        others = other.materialize()
        return _concatenated(contractions.gram(block, others, dtype) for _, block in self._blocks())

    def dot(self, directions: Tensor) -> Tensor:
        """Return ⟨gᵢ, dₖ⟩, ``[B, K]``, for ``directions [K, *shape]``, in float32 at least."""
        directions = directions.to(dtypes.accumulate_dtype(self.dtype))
        return _concatenated(contractions.gram(block, directions) for _, block in self._blocks())

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ``left[j]ᵀ gᵢ right[j]``, ``[B, K]``, gᵢ seen as ``[o, rest]``, for ``[K, o]`` and ``[K, rest]``."""
        return _concatenated(contractions.project(block, left, right) for _, block in self._blocks())

    def outputs(self) -> Sequence[Factor]:
        """Return the factors of g₁ … g_K where one gradient is the stack ``[K, *shape]`` of these."""
        from persample.factors.dense import Dense

        return [Dense(values) for values in self.materialize().unbind(1)]

    def scale_outputs(self, scale: Tensor, dtype: torch.dtype) -> Factor:
        """Return the factor of sₖ gₖ for gradients ``[K, *shape]`` and ``scale [B, K]``, in ``dtype``."""
        from persample.factors.dense import Dense

        return Dense(contractions.scaled_along(self.materialize(), 1, scale, dtype))

    def squared_norms_of_outputs(self) -> Tensor:
        """Return ‖gₖ‖² for gradients ``[K, *shape]``, ``[B, K]`` float64."""
        blocks = (norms.squared_norms(block.flatten(0, 1)) for _, block in self._blocks())
        return _concatenated(blocks).view(len(self), self.shape[0])

    @classmethod
    def concatenate(cls: type[F], factors: Sequence[F]) -> Factor | None:
        """Return the factor of the samples of all, or None where they do not fit together."""
        if len({row_format(factor) for factor in factors}) > 1:
            return None
        operands = zip(*(factor.tensors for factor in factors), strict=True)
        return with_tensors(factors[0], [torch.cat(rows) for rows in operands])

    def add(self, other: Factor) -> Factor | None:  # noqa: ARG002
        """Return the factor of gᵢ + hᵢ, or None where one of this kind does not hold it."""
        return None

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the gradients of a few samples at a time, in one buffer: a block is valid until the next one."""
        size, step = len(self), cost_model.rows_per_block(len(self), prod(self.shape), self.device)
        buffer: Tensor | None = None
        for start in range(0, max(size, 1), step):
            index = slice(start, min(start + step, size))
            reused = None if buffer is None or tracing.is_traced(buffer) else buffer[: index.stop - start]
            buffer = self.rows(index).materialize(reused)
            yield index, buffer


def tensor_fields(x: Any) -> dict[str, Tensor]:
    """Return the fields of a dataclass that are tensors, by name."""
    return {field.name: value for field in fields(x) if isinstance(value := getattr(x, field.name), Tensor)}


def with_tensors(factor: F, tensors: Iterable[Tensor]) -> F:
    """Return a factor with other tensors in the fields that are tensors."""
    return replace(factor, **dict(zip(tensor_fields(factor), tensors, strict=True)))


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
