"""Inner products of the gradients of K outputs that share the inputs of a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from persample.factors import contractions, cost_model
from persample.factors.base import Factor
from persample.factors.outer import Outer, folded


def gram_of_outputs(one: Factor, other: Factor, dtype: torch.dtype | None) -> Tensor | None:
    """Return ⟨gᵢₖ, hⱼₗ⟩, ``[B·K, B'·K']``, for gradients ``[K, *shape]`` and ``[K', *shape]``.

    Args:
        one: the gradients g.
        other: the gradients h; the same object for the own Gram matrix.
        dtype: the dtype of the inner products; None for that of the gradients, or float32.

    Returns:
        The inner products; None for factors whose outputs do not share their right operand.
    """
    if not isinstance(one, Outer) or not isinstance(other, Outer):
        return None
    found = one.layout.without_first()
    if found is None or found[0] != 1 or other.layout.without_first() != found:
        return None
    default = contractions.gram_dtype(one.dtype, other.dtype)
    if one.num_terms == other.num_terms == 1:
        return _products_of_grams(one, other, default if dtype is None else dtype)
    groups, rows, columns = found[1].block
    written = max(len(one) * one.shape[0], len(other) * other.shape[0]) * groups * columns
    step = cost_model.rows_per_block(rows, written, one.device, num_blocks=4)
    total: Any = 0
    for start in range(0, rows, step):
        index = slice(start, start + step)
        first = _written_out(one, index, default)
        second = first if other is one else _written_out(other, index, default)
        total = total + contractions.gram(first, second, dtype)
    return total


def _products_of_grams(one: Outer, other: Outer, dtype: torch.dtype) -> Tensor:
    """Return the inner products for T = 1: those of signals, times those of inputs."""
    sizes = len(one), one.shape[0], len(other), other.shape[0]
    one, other = one.balanced(dtype), other.balanced(dtype)

    def signals(x: Outer) -> Tensor:
        return x.left.squeeze(2).unflatten(2, (x.shape[0], -1)).movedim(1, 0).flatten(1, 2).to(dtype)

    left = signals(one) @ signals(other).mT
    right = folded(one.right.to(dtype)) @ folded(other.right.to(dtype)).mT
    products = left.unflatten(2, sizes[2:]).unflatten(1, sizes[:2]) * right[:, :, None, :, None]
    return products.sum(0).flatten(2).flatten(0, 1)


def _written_out(factor: Outer, index: slice, dtype: torch.dtype) -> Tensor:
    """Return a few rows of the parameter, written out for all outputs of all samples: ``[B·K, …]``."""
    left = factor.left.unflatten(3, (factor.shape[0], -1))[..., index]
    rows = left.flatten(3).mT.to(dtype) @ factor.right.to(dtype)
    return rows.unflatten(2, left.shape[3:]).movedim(2, 1).flatten(0, 1)
