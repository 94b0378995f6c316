"""Gram matrices over all parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from persample.factors import contractions
from persample.factors.base import Factor
from persample.factors.outputs import ByOutput, by_row, sizes
from persample.utils.norms import memory_of_rows


def summed_gram(
    factors: Sequence[Factor], dtype: torch.dtype | None = None, others: Sequence[Factor] | None = None
) -> Tensor:
    """Return ⟨gᵢ, hⱼ⟩, ``[B, B']``, over all parameters; of K outputs ``[B, K, B', K']``.

    Args:
        factors: the gradients g of each parameter.
        dtype: the dtype of the inner products; None for that of the gradients, or float32.
        others: the gradients h of each parameter; None for g.
    """
    rows = list(map(by_row, factors))
    if dtype == torch.float64 and others is None:
        matrix = _summed_in_float64(rows)
    else:
        pairs = zip(rows, [None] * len(rows) if others is None else map(by_row, others), strict=True)
        matrix = functools.reduce(torch.add, (_gram(factor, other, dtype) for factor, other in pairs))
    return matrix.reshape(*sizes(factors[0]), *sizes((factors if others is None else others)[0]))


def _gram(one: Factor, other: Factor | None, dtype: torch.dtype | None) -> Tensor:
    if isinstance(other, ByOutput) and not isinstance(one, ByOutput):  # which shares the inputs of the outputs
        return other.gram(one, dtype).T
    return one.gram(other, dtype)


def _summed_in_float64(factors: Sequence[Factor]) -> Tensor:
    """Return the Gram matrix; tensors that share memory (a bias and its signals) share one product."""
    known: dict[object, tuple[Tensor, Tensor]] = {}

    def gram(x: Tensor) -> Tensor:  # float64 holds the products of all float32 numbers: no operand needs a scale
        rows = x.flatten(1) if x.ndim > 1 else x.unsqueeze(1)
        key = memory_of_rows(rows)
        if key not in known:
            known[key] = rows, contractions.gram(rows, rows, torch.float64)
        return known[key][1]

    def of_factor(factor: Factor) -> Tensor:
        operands = factor.norm_operands
        return functools.reduce(torch.mul, map(gram, operands)) if operands else factor.gram(dtype=torch.float64)

    return functools.reduce(torch.add, map(of_factor, factors))
