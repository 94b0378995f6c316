"""Gradients of weights used in matrix products: Σₜ lₜ rₜᵀ for each sample, signals times inputs."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from persample._torch import is_alias_of
from persample.factors import contractions, cost_model
from persample.factors.base import Factor
from persample.factors.layout import Layout
from persample.factors.terms import squared_norms_of_sums
from persample.utils import dtypes, norms, strides


@dataclass(frozen=True)
class Outer(Factor):
    """Per-sample gradients Σₜ lₜ rₜᵀ, G blocks of them, laid out in the shape of the parameter.

    Args:
        left: back-propagated signals l, ``[B, G, T, o]``.
        right: inputs r, ``[B, G, T, i]``.
        layout: the mapping from ``[G, o, i]`` to the shape of the parameter.
        out_dtype: the dtype of the gradients; that of the operands may differ.

    Examples:
        >>> l, r = torch.tensor([[[[3.0]]]]), torch.tensor([[[[1.0, 2.0]]]])
        >>> factor = Outer(l, r, Layout((), (1,), (2,), (0, 1), (1, 2)), l.dtype)
        >>> factor.materialize(), factor.squared_norms().round()
        (tensor([[[3., 6.]]]), tensor([45.], dtype=torch.float64))
    """

    left: Tensor
    right: Tensor
    layout: Layout
    out_dtype: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gradients."""
        return self.out_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one gradient."""
        return self.layout.shape

    @property
    def num_terms(self) -> int:
        """T, the number of uses of the parameter within one sample."""
        return self.left.shape[2]

    @property
    def norm_operands(self) -> tuple[Tensor, ...]:
        """Signals and inputs, where T = G = 1."""
        return (self.left, self.right) if self.num_terms == self.left.shape[1] == 1 else ()

    @property
    def term_operands(self) -> tuple[Tensor, Tensor] | None:
        """Signals and inputs, where norms are computed from the inner products of terms."""
        return (self.left, self.right) if self.num_terms > 1 and self.needs_no_writing else None

    def materialize(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients, ``[B, *shape]``."""
        left, right = self.left.mT, self.right
        if out is not None and out.dtype == self.dtype == left.dtype == right.dtype:
            target = self.layout.blocks(out)
            if is_alias_of(target, out):
                if self.num_terms == 1:
                    torch.mul(strides.laid_out(left, target), strides.laid_out(right, target), out=target)
                else:
                    torch.matmul(left, strides.laid_out(right), out=target)
                return out
        if self.num_terms == 1:  # twice as fast as bmm, and the result has the operands' order in memory
            product = strides.laid_out(left) * strides.laid_out(right)
        else:
            product = contractions.sum_of_products(self.left, strides.laid_out(right))
        values = self.layout.restore(product).to(self.dtype)
        return values if out is None else out.copy_(values)

    def scale_rows(self, scale: Tensor) -> Outer:
        """Return the factor of sᵢ gᵢ for ``scale [B]``, in float32 at least."""
        dtype = dtypes.accumulate_dtype(self.dtype)
        # Each operand is multiplied by √|s|: one operand times s might overflow.
        root, sign = (contractions.per_sample(x, self.left) for x in (scale.double().abs().sqrt(), scale.sign()))
        left, right = (self.left.double() * (root * sign)).to(dtype), (self.right.double() * root).to(dtype)
        return replace(self, left=left, right=right, out_dtype=dtype)

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖², ``[B]`` float64."""
        if self.norm_operands:
            return functools.reduce(torch.mul, norms.squared_norms_of_each(self.norm_operands))
        if self.num_terms == 1:
            left, right = (norms.squared_norms(x.flatten(0, 2)).view(x.shape[:2]) for x in (self.left, self.right))
            return (left * right).sum(1)
        terms = self.term_operands
        return super().squared_norms() if terms is None else squared_norms_of_sums([terms])[0]

    @property
    def needs_no_writing(self) -> bool:
        """Whether norms are computed from operands alone."""
        return self.num_terms == 1 or cost_model.inner_products_are_faster(self.size)

    def weighted_sum(self, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return Σ wᵢ gᵢ, ``[*shape]``, by the product that computes the batch gradient, on scaled signals."""
        left, right = self.left, self.right
        if weights is not None and left.numel() <= right.numel():
            left = dtypes.scaled_rows(left, weights, dtype)
        elif weights is not None:
            right = dtypes.scaled_rows(right, weights, dtype)
        left, right = left.to(dtype), right.to(dtype)
        if left.shape[1] == 1:  # mm is faster than bmm
            left, right = left.squeeze(1), right.squeeze(1)
            if left.stride(1) > left.stride(0) and right.stride(1) > right.stride(0):  # the order is that in memory
                left, right = left.transpose(0, 1), right.transpose(0, 1)
            product = contractions.sum_of_products(left.flatten(0, 1), right.flatten(0, 1))
            return product.view(self.shape) if self.layout.is_matrix else self.layout.restore(product[None, None])[0]
        return self.layout.restore((folded(left).mT @ folded(right))[None])[0]

    def balanced(self, dtype: torch.dtype) -> Outer:
        """Return the same gradients with operands of like norms, where the squares of one might overflow in a dtype.

        Args:
            dtype: the dtype of the squares; float64 holds those of all float32 numbers.
        """
        if torch.float64 in (dtype, self.dtype):
            return self
        dtype = dtypes.accumulate_dtype(self.dtype)
        left, right = (norms.squared_norms(x.flatten(1)) for x in (self.left, self.right))
        # A GPU balances faster than it answers.
        if left.device.type == "cpu" and not any(norms.has_extreme(x, 1e20) for x in (left, right)):
            return self
        regular = (left > 0) & (right > 0) & left.isfinite() & right.isfinite()
        ratio = torch.where(regular, right / left, 1).sqrt().sqrt().view(-1, 1, 1, 1)
        return replace(self, left=(self.left * ratio).to(dtype), right=(self.right / ratio).to(dtype))

    def second_moment(self, weights: Tensor | None, dtype: torch.dtype, center: Tensor | None = None) -> Tensor:
        """Return Σ wᵢ (gᵢ − center)², elementwise ``[*shape]``."""
        if self.num_terms > 1 or (center is not None and dtype != torch.float64):
            return super().second_moment(weights, dtype, center)
        balanced = self.balanced(dtype)
        squares = replace(self, left=balanced.left.to(dtype).square(), right=balanced.right.to(dtype).square())
        moment = squares.weighted_sum(weights, dtype)
        if center is not None:  # float64 keeps 6 digits of this difference at mean/std = 1e5
            total = len(self) if weights is None else weights.sum()
            moment = moment - 2 * center * self.weighted_sum(weights, dtype) + center.square() * total
        return moment.clamp_min(0)

    def gram(self, other: Factor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return ⟨gᵢ, hⱼ⟩, ``[B, B']``."""
        other = self if other is None else other
        if not isinstance(other, Outer) or other.layout != self.layout:
            return super().gram(other, dtype)
        dtype = contractions.gram_dtype(self.dtype, other.dtype) if dtype is None else dtype
        if self.num_terms == other.num_terms == 1:
            pairs = _pairs(self.balanced(dtype), other.balanced(dtype))
            left, right = (folded(a.to(dtype)) @ folded(b.to(dtype)).mT for a, b in pairs)
            return left[0] * right[0] if len(left) == 1 else (left * right).sum(0)
        blocks = _written_out(self, other, contractions.gram_dtype(self.dtype, other.dtype))
        return functools.reduce(torch.add, (contractions.gram(a, b, dtype) for a, b in blocks))

    def dot(self, directions: Tensor) -> Tensor:
        """Return ⟨gᵢ, dₖ⟩, ``[B, K]``: Σₜ lₜᵀ Dₖ rₜ."""
        dtype = dtypes.accumulate_dtype(self.dtype)
        left, right = self.left.to(dtype), self.right.to(dtype)
        matrices = self.layout.blocks(directions.to(dtype))
        if self.layout.block[1] < self.layout.block[2]:  # the smaller side is multiplied elementwise
            left, right, matrices = right, left, matrices.mT
        return torch.stack([((left @ matrix) * right).sum((1, 2, 3)) for matrix in matrices], 1)

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ``left[j]ᵀ gᵢ right[j]``, ``[B, K]``: signals and inputs are projected separately."""
        if not self.layout.is_matrix:
            return super().project(left, right)
        dtype = dtypes.accumulate_dtype(self.dtype)
        signals, inputs = self.left[:, 0].to(dtype), self.right[:, 0].to(dtype)
        return ((signals @ left.to(dtype).T) * (inputs @ right.to(dtype).T)).sum(1)

    def outputs(self) -> Sequence[Factor]:
        """Return the factors of g₁ … g_K where one gradient is the stack ``[K, *shape]``; they share inputs."""
        found = self.layout.without_first()
        if found is None:
            return super().outputs()
        (kind, layout), count = found, self.shape[0]
        parts = [
            [x] * count if axis is None else x.unflatten(axis, (count, -1)).unbind(axis)
            for x, axis in zip((self.left, self.right), _AXES[kind], strict=True)
        ]
        return [replace(self, left=left, right=right, layout=layout) for left, right in zip(*parts, strict=True)]

    def scale_outputs(self, scale: Tensor, dtype: torch.dtype) -> Factor:
        """Return the factor of sₖ gₖ for gradients ``[K, *shape]`` and ``scale [B, K]``: one operand is scaled."""
        found = self.layout.without_first()
        if found is None:
            return super().scale_outputs(scale, dtype)
        left, right, (axis, other) = self.left.to(dtype), self.right.to(dtype), _AXES[found[0]]
        if axis is not None:
            left = contractions.scaled_along(left, axis, scale, dtype)
        elif other is not None:
            right = contractions.scaled_along(right, other, scale, dtype)
        return replace(self, left=left, right=right, out_dtype=dtype)

    def squared_norms_of_outputs(self) -> Tensor:
        """Return ‖gₖ‖² for gradients ``[K, *shape]``, ``[B, K]`` float64."""
        found = self.layout.without_first()
        if found is None:
            return super().squared_norms_of_outputs()
        if found[0] == 1 and self.num_terms == self.left.shape[1] == 1:
            left, right = norms.squared_norms_of_each([self.left.reshape(len(self) * self.shape[0], -1), self.right])
            return left.view(len(self), self.shape[0]) * right[:, None]
        if self.needs_no_writing:
            return torch.stack([factor.squared_norms() for factor in self.outputs()], 1)
        return super().squared_norms_of_outputs()

    @classmethod
    def concatenate(cls, factors: Sequence[Outer]) -> Outer | None:
        """Return the factor of the samples of all; fewer terms are padded with zeros."""
        if len({factor.layout for factor in factors}) > 1:
            return None
        num_terms = max(factor.num_terms for factor in factors)
        left, right = (
            torch.cat([pad(x, (0, 0, 0, num_terms - x.shape[2])) for x in operands])
            for operands in zip(*((factor.left, factor.right) for factor in factors), strict=True)
        )
        return replace(factors[0], left=left, right=right)

    def add(self, other: Factor) -> Outer | None:
        """Return the factor of gᵢ + hᵢ: a sum of more terms."""
        if not isinstance(other, Outer) or other.layout != self.layout:
            return None
        left, right = (torch.cat(pair, dim=2) for pair in _pairs(self, other))
        return replace(self, left=left, right=right)


# The axes of the operands that an axis among the groups, rows or columns of a layout is merged in.
_AXES = ((1, 1), (3, None), (None, 3))


def folded(x: Tensor) -> Tensor:
    """Return ``[G, B·T, n]`` from ``[B, G, T, n]``: samples and terms become one axis."""
    return x.transpose(0, 1).flatten(1, 2)


def _pairs(one: Outer, other: Outer) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return (one.left, other.left), (one.right, other.right)


def _written_out(one: Outer, other: Outer, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a few rows of the parameter at a time, written out for all samples of both factors."""
    groups, rows, columns = one.layout.block
    step = cost_model.rows_per_block(rows, max(len(one), len(other)) * groups * columns, one.device, 4)
    for start in range(0, rows, step):
        index = slice(start, start + step)
        first = one.left[..., index].mT.to(dtype) @ one.right.to(dtype)
        yield first, first if other is one else other.left[..., index].mT.to(dtype) @ other.right.to(dtype)
