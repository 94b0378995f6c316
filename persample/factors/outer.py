"""Gradients of weights used in matrix products: Σₜ lₜ rₜᵀ for each sample, signals times inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from persample.factors import contractions, cost_model
from persample.factors.contractions import squared_norms_of_sums
from persample.factors.factor import Factor
from persample.factors.term_moments import TermMoments
from persample.utils import numerics


@dataclass(frozen=True)
class Outer(Factor):
    """Per-sample gradients Σₜ lₜ rₜᵀ, G blocks of them, ``[G, o, i]`` in the shape of the parameter.

    Examples:
        >>> l, r = torch.tensor([[[[3.0]]]]), torch.tensor([[[[1.0, 2.0]]]])
        >>> factor = Outer(l, r, (1, 2), l.dtype)
        >>> factor.materialize(), factor.squared_norms().round()
        (tensor([[[3., 6.]]]), tensor([45.], dtype=torch.float64))
    """

    left: Tensor  # back-propagated signals l, ``[B, G, T, o]``; of K outputs ``[B, K, G, T, o]``
    right: Tensor  # inputs r, ``[B, G, T, i]``; of K outputs, ``[B, 1, G, T, i]``. Or the other way round.
    param_shape: tuple[int, ...]
    out_dtype: torch.dtype  # the dtype of the gradients; that of the operands may differ

    @property
    def dtype(self) -> torch.dtype:
        return self.out_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.outputs, *self.param_shape)

    @property
    def num_terms(self) -> int:
        """T, the number of uses of the parameter within one sample."""
        return self.left.shape[-2]

    @property
    def _term_axes(self) -> tuple[int, int]:
        return -2, -2

    @property
    def product_operands(self) -> tuple[Tensor, ...]:
        """Signals and inputs, where T = G = 1."""
        return (self.left, self.right) if self.num_terms == self.left.shape[-3] == 1 else ()

    @property
    def term_operands(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Signals and inputs of each output, where norms are computed from the inner products of terms."""
        if self.num_terms == 1 or not self.needs_no_writing:
            return ()
        return [(one.left, one.right) for one in self.of_outputs]

    @property
    def block(self) -> tuple[int, int, int]:
        """G, o and i."""
        return self.left.shape[-3], self.left.shape[-1], self.right.shape[-1]

    @property
    def has_rows(self) -> bool:
        """Whether o is the first axis of the parameter, and i all the others."""
        groups, rows, _ = self.block
        return groups == 1 and rows == (*self.param_shape, 1)[0]

    @property
    def is_left(self) -> bool:
        """Whether it is the left operand that differs among K outputs."""
        return bool(self.outputs) and self.left.shape[1] >= self.right.shape[1]

    @property
    def _operands(self) -> tuple[Tensor, Tensor]:
        """Signals and inputs ``[B, G, T, …]``; K outputs are a part of the last axis."""
        if not self.outputs:
            return self.left, self.right
        return self.left.movedim(1, 3).flatten(3), self.right.movedim(1, 3).flatten(3)

    @property
    def as_one(self) -> Outer:
        """The K gradients of each sample as one: those of K times as many rows, or columns."""
        if not self.outputs:
            return self
        left, right = self._operands
        shape = (left.shape[-1], right.shape[-1]) if left.shape[1] == 1 else self.shape
        return replace(self, left=left, right=right, param_shape=shape, outputs=())

    @property
    def order(self) -> tuple[object, ...]:
        """The blocks, and which operand differs among outputs."""
        return self.block, self.is_left

    @property
    def _is_in_order(self) -> bool:
        """Whether products of the operands are the elements of K gradients, in order."""
        return self.is_left and self.left.shape[-3] == 1

    def _restored(self, products: Tensor, *lead: int) -> Tensor:
        """Return gradients ``[*lead, *shape]`` from products of the operands, ``[*lead, G, o, i]``."""
        if self.outputs and not self._is_in_order:
            products = contractions.by_output(products, self.block, (self.left.shape[1], self.right.shape[1]))
        return products.reshape((*lead, *self.shape))

    def materialize(self, out: Tensor | None = None) -> Tensor:
        signals, right = self._operands
        left = signals.mT
        in_order = not self.outputs or self._is_in_order
        if out is not None and in_order and out.dtype == self.dtype == left.dtype == right.dtype:
            target = out.reshape(*left.shape[:-1], right.shape[-1])
            if numerics.storage_key(target) == numerics.storage_key(out):
                if self.num_terms == 1:
                    torch.mul(numerics.laid_out(left, target), numerics.laid_out(right, target), out=target)
                else:
                    torch.matmul(left, numerics.laid_out(right), out=target)
                return out
        if self.num_terms == 1:  # twice as fast as bmm, and the result has the operands' order in memory
            product = numerics.laid_out(left) * numerics.laid_out(right)
        else:
            product = contractions.sum_of_products(signals, numerics.laid_out(right))
        values = self._restored(product, len(self)).to(self.dtype)
        return values if out is None else out.copy_(values)

    def scale_rows(self, scale: Tensor) -> Outer:
        """Return the factor of sᵢ gᵢ for ``scale [B]``, in float32 at least."""
        dtype, size = numerics.accumulate_dtype(self.dtype), scale.double().abs()
        # Each operand is multiplied by √|s|, of the largest s of all outputs: one operand times s might overflow.
        root = (size if size.ndim == 1 else size.amax(1)).sqrt()
        rest = torch.where(size == 0, 0, scale / contractions.per_row(root, scale))
        left, right = (rest, root) if self.is_left or not self.outputs else (root, rest)
        left, right = (x.double() * contractions.per_row(s, x) for x, s in ((self.left, left), (self.right, right)))
        return replace(self, left=left.to(dtype), right=right.to(dtype), out_dtype=dtype)

    def times_rank_one(self, rows: Tensor, columns: Tensor) -> Factor:
        """Return the factor of s ⊙ gᵢ for s = rows columnsᵀ: signals and inputs are multiplied."""
        if not self.has_rows:
            return super().times_rank_one(rows, columns)
        dtype = numerics.accumulate_dtype(self.dtype)
        left, right = (x.double() * scale.flatten() for x, scale in ((self.left, rows), (self.right, columns)))
        return replace(self, left=left.to(dtype), right=right.to(dtype), out_dtype=dtype)

    def rotated(self, left: Tensor, right: Tensor) -> Factor:
        """Return the factor of Lᵀ gᵢ R: signals and inputs are rotated."""
        if self.block != (left.shape[:-2].numel(), left.shape[-1], right.shape[-1]):
            return super().rotated(left, right)
        pairs = (self.left.to(left.dtype), left), (self.right.to(right.dtype), right)
        signals, inputs = (x * basis if basis.ndim == 1 else x @ basis for x, basis in pairs)
        return replace(self, left=signals, right=inputs, out_dtype=left.dtype)

    def squared_norms(self) -> Tensor:
        if self.num_terms == 1:
            left, right = numerics.squared_norms_of_each([self.left, self.right], self.left.ndim - 2)
            return (left * right).sum(-1)
        terms = self.term_operands
        return self.joined(squared_norms_of_sums(terms)) if terms else super().squared_norms()

    def term_norms(self) -> Tensor:
        """Return ‖lₜ‖ ‖rₜ‖ of each term, ``[B, T]``."""
        left, right = numerics.squared_norms_of_each([self.left, self.right], self.left.ndim - 1)
        return numerics.root((left * right).sum(-2))

    def kronecker(self, moments: TermMoments) -> tuple[Tensor, Tensor]:
        """Return the second moments of signals, ``[o, o]``, and of inputs, ``[i, i]``; ``[G, …]`` of several blocks."""
        dtype = numerics.accumulate_dtype(self.dtype)
        left = moments.of(self.left, "left", self.outputs, dtype)
        return left, moments.of(self.right, "right", self.outputs, dtype)

    def summed_terms(self, filled: Tensor | None) -> Outer:  # noqa: ARG002 (padding is zero)
        """Return the product of the sum of the signals and the sum of the inputs of each sample."""
        dtype = numerics.accumulate_dtype(self.dtype)
        left, right = (x.sum(-2, keepdim=True, dtype=dtype) for x in (self.left, self.right))
        return replace(self, left=left, right=right, out_dtype=dtype)

    @property
    def needs_no_writing(self) -> bool:
        """Whether norms are computed from operands alone."""
        return self.num_terms == 1 or cost_model.inner_products_are_faster(self.size)

    def weighted_sum(self, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return Σ wᵢ gᵢ, ``[*shape]``, by the product that computes the batch gradient, on scaled signals."""
        if weights is not None and weights.ndim > 1:
            return self.scale_outputs(weights, dtype).weighted_sum(None, dtype)
        left, right = self._operands
        has_one_group = left.shape[1] == 1
        if has_one_group:  # fewer axes, and mm is faster than bmm
            left, right = left.squeeze(1), right.squeeze(1)
            if left.shape[1] == 1:
                left, right = left.squeeze(1), right.squeeze(1)
        if weights is not None and left.numel() <= right.numel():
            left = numerics.scaled_rows(left, weights, dtype)
        elif weights is not None:
            right = numerics.scaled_rows(right, weights, dtype)
        left, right = left.to(dtype), right.to(dtype)
        if not has_one_group:
            return self._restored(folded(left).mT @ folded(right))
        if left.ndim > 2:
            if left.stride(1) > left.stride(0) and right.stride(1) > right.stride(0):  # the order is that in memory
                left, right = left.transpose(0, 1), right.transpose(0, 1)
            left, right = left.flatten(0, 1), right.flatten(0, 1)
        return self._restored(contractions.sum_of_products(left, right))

    def balanced(self, dtype: torch.dtype) -> Outer:
        """Rescale both operands to similar norms, so that squaring neither overflows in a dtype."""
        if torch.float64 in (dtype, self.dtype):
            return self
        dtype = numerics.accumulate_dtype(self.dtype)
        left, right = (numerics.squared_norms(x.flatten(1)) for x in (self.left, self.right))
        # A GPU balances faster than it answers.
        if left.device.type == "cpu" and not any(numerics.has_extreme(x, 1e20) for x in (left, right)):
            return self
        regular = (left > 0) & (right > 0) & left.isfinite() & right.isfinite()
        ratio = contractions.per_row(torch.where(regular, right / left, 1).sqrt().sqrt(), self.left)
        return replace(self, left=(self.left * ratio).to(dtype), right=(self.right / ratio).to(dtype))

    def second_moment(self, weights: Tensor | None, dtype: torch.dtype, center: Tensor | None = None) -> Tensor:
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
        other = self if other is None else other
        if not isinstance(other, Outer) or other.block != self.block:
            return super().gram(other, dtype)
        dtype = contractions.gram_dtype(self.dtype, other.dtype) if dtype is None else dtype
        if self.num_terms == other.num_terms == 1:
            pairs = _pairs(self.balanced(dtype), other.balanced(dtype))
            left, right = (_products(a.to(dtype), b.to(dtype)) for a, b in pairs)
            return left[0] * right[0] if len(left) == 1 else (left * right).sum(0)
        groups, rows, columns = self.block
        pairs_of_terms = self.num_terms * other.num_terms
        if groups == 1 and not (self.outputs or other.outputs) and pairs_of_terms * (rows + columns) <= rows * columns:
            return self._gram_by_terms(other, dtype)
        if not self.has_rows:
            return super().gram(other, dtype)
        wide = contractions.gram_dtype(self.dtype, other.dtype)
        one = self.converted(wide)
        return one.gram_by_rows(one if other is self else other.converted(wide), dtype)

    def own_gram(self) -> Tensor:
        """Return ⟨gᵢₖ, gᵢₗ⟩ of the outputs of each sample, ``[B, K, K]``; of few terms, by their products."""
        groups, rows, columns = self.block
        if not self.outputs or groups > 1 or self.num_terms**2 * (rows + columns) > rows * columns + rows + columns:
            return super().own_gram()
        each, shared = (self.left, self.right) if self.is_left else (self.right, self.left)
        each, dtype = each.squeeze(2).double(), numerics.accumulate_dtype(self.dtype)
        if self.num_terms == 1:
            each, squares = each.squeeze(2), numerics.squared_norms(shared.flatten(1))
            return (each @ each.mT * contractions.per_row(squares, each)).to(dtype)
        shared = shared.squeeze(2).double()
        return (each.flatten(2) @ (shared @ shared.mT @ each).flatten(2).mT).to(dtype)

    def _gram_by_terms(self, other: Outer, dtype: torch.dtype) -> Tensor:
        """Return ⟨gᵢ, hⱼ⟩ by the products of all pairs of terms, in float64, as these may cancel."""
        theirs = [x.squeeze(1).flatten(0, 1).double() for x in (other.left, other.right)]
        terms = (self.num_terms, len(other), other.num_terms)

        def products(left: Tensor, right: Tensor) -> Tensor:
            mine = (x.squeeze(1).flatten(0, 1).double() for x in (left, right))
            of_left, of_right = (one @ two.mT for one, two in zip(mine, theirs, strict=True))
            return (of_left * of_right).view(len(left), *terms).sum((1, 3)).to(dtype)

        step = cost_model.rows_per_block(len(self), math.prod(terms), self.device)
        blocks = [products(*rows) for rows in zip(self.left.split(step), self.right.split(step), strict=True)]
        return torch.cat(blocks) if len(blocks) > 1 else blocks[0]

    def converted(self, dtype: torch.dtype) -> Outer:
        """Return the same gradients with operands in a dtype."""
        return replace(self, left=self.left.to(dtype), right=self.right.to(dtype), out_dtype=dtype)

    def some_rows(self, index: Tensor) -> Factor:
        if not self.has_rows:
            return super().some_rows(index)
        return replace(self, left=self.left[..., index], param_shape=(len(index), self.right.shape[-1]))

    def dot(self, directions: Tensor) -> Tensor:
        """Return ⟨gᵢ, dⱼ⟩, ``[B, D]``: Σₜ lₜᵀ Dⱼ rₜ."""
        dtype = numerics.accumulate_dtype(self.dtype)
        left, right = self.left.to(dtype), self.right.to(dtype)
        matrices = directions.to(dtype).reshape(-1, *self.block)
        # The smaller side is multiplied elementwise, or that which differs among outputs.
        if self.is_left if self.outputs else left.shape[-1] < right.shape[-1]:
            left, right, matrices = right, left, matrices.mT
        return torch.stack([((left @ matrix) * right).sum((-3, -2, -1)) for matrix in matrices], -1)

    def projected_terms(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the products of signals and of inputs with signs, where o (of all blocks) is the first axis."""
        groups, rows, columns = self.block
        if (left.shape[1], right.shape[1]) != (groups * rows, columns):
            return None
        dtype = numerics.accumulate_dtype(self.dtype)
        signs = left.to(dtype).view(-1, groups, rows).permute(1, 2, 0)
        signs = signs[0] if groups == 1 else signs  # one product for all samples
        return (self.left.to(dtype) @ signs).flatten(-3, -2), (self.right.to(dtype) @ right.to(dtype).T).flatten(-3, -2)

    @classmethod
    def concatenate(cls, factors: Sequence[Outer]) -> Outer | None:
        """Return the factor of the samples of all; fewer terms are padded with zeros."""
        if len({factor.block for factor in factors}) > 1:
            return None
        num_terms = max(factor.num_terms for factor in factors)
        left, right = (
            torch.cat([pad(x, (0, 0, 0, num_terms - x.shape[-2])) for x in operands])
            for operands in zip(*((factor.left, factor.right) for factor in factors), strict=True)
        )
        return replace(factors[0], left=left, right=right)

    def add(self, other: Factor) -> Outer | None:
        """Return the factor of gᵢ + hᵢ: a sum of more terms."""
        if not isinstance(other, Outer) or (other.block, other.is_left) != (self.block, self.is_left):
            return None
        left, right = (torch.cat(pair, dim=-2) for pair in _pairs(self, other))
        return replace(self, left=left, right=right)


def folded(x: Tensor) -> Tensor:
    """Return ``[G, B·T, n]`` from ``[B, G, T, n]``: samples, outputs and terms become one axis."""
    return x.movedim(-3, 0).flatten(1, -2)


def _products(x: Tensor, y: Tensor) -> Tensor:
    """Return the inner products of ``x [B, G, 1, n]`` and ``y [B', G, 1, n]``, ``[G, B, B']``."""
    return (folded(x) @ folded(y).mT).view(-1, *x.shape[:-3], *y.shape[:-3])


def _pairs(one: Outer, other: Outer) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return (one.left, other.left), (one.right, other.right)
