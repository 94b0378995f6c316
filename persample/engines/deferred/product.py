"""Deferred broadcast products, summed over one more axis: the gradients of matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from persample.engines.deferred.terms import DeferredTerm
from persample.factors.layout import Layout
from persample.factors.outer import Outer


@dataclass(frozen=True)
class ProductTerm(DeferredTerm):
    """Σₜ l[…, t] r[…, t]. An operand has size 1 along the axes where it repeats.

    The batch axis is not marked: views move it with the others, and it is the first axis of a gradient.

    Args:
        shape: the shape of the tensor: the axes, merged or split where it differs.
        left: ``[*axes, T]``.
        right: ``[*axes, T]``.
    """

    left: Tensor
    right: Tensor

    @classmethod
    def of(cls, left: Tensor, right: Tensor) -> ProductTerm:
        """Return the product of two operands in the shape of their axes."""
        return cls(_axes(left, right), left, right)

    @property
    def axes(self) -> tuple[int, ...]:
        """The sizes of the product before axes were merged or split."""
        return _axes(self.left, self.right)

    def factor(self, dtype: torch.dtype) -> Outer | None:
        """Return the factor whose samples are the rows of the tensor, or None if their axis was merged with others."""
        if not self.shape or self.axes[:1] != self.shape[:1]:
            return None
        return outer(self.left, self.right, self.shape[1:], dtype)

    def compute(self, dtype: torch.dtype) -> Tensor:
        """Return the tensor, contiguous."""
        left, right = self.left[None], self.right[None]
        return outer(left, right, self.shape, dtype).materialize()[0].contiguous()

    def scale(self, number: Any) -> ProductTerm | None:
        """Return the product with a number, or with a tensor that varies only along axes of one operand."""
        if not isinstance(number, Tensor) or number.ndim == 0:
            return replace(self, left=self.left * number)
        if self.axes != self.shape:
            return None
        number = number.reshape(*[1] * (len(self.shape) - number.ndim), *number.shape)
        for place, operand in enumerate(self.tensors):
            if all(n in {1, own} for n, own in zip(number.shape, operand.shape, strict=False)):
                scaled = operand * number.unsqueeze(-1)
                return ProductTerm.of(*((scaled, self.right) if place == 0 else (self.left, scaled)))
        return None

    def permute(self, dims: Sequence[int]) -> ProductTerm | None:
        """Return the product with its axes in another order."""
        if self.axes != self.shape:
            return None
        order = [*(dim % len(self.shape) for dim in dims), len(self.shape)]
        return ProductTerm.of(*(x.permute(order) for x in self.tensors))

    def pick(self, dim: int, index: slice) -> ProductTerm | None:
        """Return a range along one axis."""
        if self.axes != self.shape:
            return None
        if (
            len(range(*index.indices(self.shape[dim]))) == 0
        ):  # an operand that repeats has size 1, and the larger size counts
            return None
        full = (slice(None),) * dim
        return ProductTerm.of(*(x[(*full, index)] if x.shape[dim] == self.shape[dim] else x for x in self.tensors))

    def place(self, dim: int, size: int, index: slice) -> ProductTerm | None:
        """Return a product of ``size`` along one axis, zero outside of a range: the adjoint of ``pick``."""
        if self.axes != self.shape:
            return None
        left_varies, right_varies = (x.shape[dim] == self.shape[dim] != 1 for x in self.tensors)
        left = self.left if right_varies and not left_varies else _placed(self.left, dim, size, index)
        return ProductTerm.of(left, _placed(self.right, dim, size, index) if right_varies else self.right)

    def reshape(self, shape: Sequence[int]) -> ProductTerm:
        """Return the product in another shape; merged axes of unlike operands stay apart in the operands."""
        shape = tuple(shape)
        left, right = (_regroup(x.shape[:-1], self.axes, shape) for x in self.tensors)
        if left is None or right is None:
            return replace(self, shape=shape)
        num_terms = self.left.shape[-1]
        return ProductTerm(shape, self.left.reshape(*left, num_terms), self.right.reshape(*right, num_terms))

    def contract(self, dim: int, matrix: Tensor) -> ProductTerm | None:
        """Return the product with an axis contracted with the first axis of a matrix.

        Args:
            dim: the axis, counted from the end: -1 or -2.
            matrix: ``[k, n]``.
        """
        left_varies, right_varies = (x.shape[dim - 1] > 1 for x in self.tensors)
        if self.axes[dim:] != self.shape[dim:] or (left_varies and right_varies):
            return None

        def contracted(x: Tensor) -> Tensor:
            dtype = torch.promote_types(x.dtype, matrix.dtype)  # operands may be narrower than the deferred tensor
            return (x.movedim(dim - 1, -1).to(dtype) @ matrix.to(dtype)).movedim(-1, dim - 1)

        shape = list(self.shape)
        shape[dim] = matrix.shape[1]
        if right_varies:
            return ProductTerm(tuple(shape), self.left, contracted(self.right))
        return ProductTerm(tuple(shape), contracted(self.left), self.right)


def outer(left: Tensor, right: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Outer:
    """Return the factor of a broadcast product summed over its last axis.

    Args:
        left: ``[B, *axes, T]``, of size 1 along the axes where it repeats.
        right: ``[B, *axes, T]``, of size 1 along the axes where it repeats.
        shape: the shape of one gradient.
        dtype: the dtype of the gradients.
    """
    batch, common = max(len(left), len(right)), torch.promote_types(left.dtype, right.dtype)
    left, right = (x.to(common) if len(x) == batch else x.to(common).expand(batch, *x.shape[1:]) for x in (left, right))
    single = [axis for axis in range(1, left.ndim - 1) if left.shape[axis] == right.shape[axis] == 1]
    if single:
        left, right = left.squeeze(single), right.squeeze(single)
    left_varies = [a > 1 for a, b in zip(left.shape[1:-1], right.shape[1:-1], strict=True) if a == 1 or b == 1]
    if left_varies and not left_varies[0]:  # rows come first, so that the factors of one parameter have equal layouts
        left, right = right, left
    layout = Layout.of_product(left.shape[1:-1], right.shape[1:-1], shape)
    _, rows, columns = layout.block
    return Outer(layout.operand(left, rows), layout.operand(right, columns), layout, dtype)


def _axes(left: Tensor, right: Tensor) -> tuple[int, ...]:
    return tuple(max(pair) for pair in zip(left.shape[:-1], right.shape[:-1], strict=True))


def _placed(x: Tensor, dim: int, size: int, index: slice) -> Tensor:
    placed = x.new_zeros(*x.shape[:dim], size, *x.shape[dim + 1 :])
    placed[(*(slice(None),) * dim, index)] = x
    return placed


def _regroup(sizes: Sequence[int], axes: Sequence[int], shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return an operand's shape after axes are merged and split, or None if it repeats along part of a merged axis."""
    result: list[int] = []
    for old, new in _matched(axes, shape):
        own, full = prod(sizes[axis] for axis in old), prod(axes[axis] for axis in old)
        if own == full:
            result += [shape[axis] for axis in new]
        elif own == 1:
            result += [1] * len(new)
        else:
            return None
    return tuple(result)


def _matched(axes: Sequence[int], shape: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the smallest groups of axes of equal products, from the front, in two shapes of equal numel."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(axes) or j < len(shape):
        old: list[int] = []
        new: list[int] = []
        a = b = 1
        while not (old or new) or a != b:
            if (a <= b and i < len(axes)) or j == len(shape):
                old, a, i = [*old, i], a * axes[i], i + 1
            else:
                new, b, j = [*new, j], b * shape[j], j + 1
        groups.append((old, new))
    return groups
