"""Gram matrices over all parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from persample.factors.base import Factor
from persample.factors.outputs import ByOutput, by_row, sizes


def summed_gram(factors: Sequence[Factor], others: Sequence[Factor] | None = None) -> Tensor:
    """Return ⟨gᵢ, hⱼ⟩, ``[B, B']``, over all parameters; of K outputs ``[B, K, B', K']``.

    Args:
        factors: the gradients g of each parameter.
        others: the gradients h of each parameter; None for g.
    """
    rows = list(map(by_row, factors))
    pairs = zip(rows, [None] * len(rows) if others is None else map(by_row, others), strict=True)
    matrix = functools.reduce(torch.add, (_gram(factor, other) for factor, other in pairs))
    return matrix.reshape(*sizes(factors[0]), *sizes((factors if others is None else others)[0]))


def _gram(one: Factor, other: Factor | None) -> Tensor:
    if isinstance(other, ByOutput) and not isinstance(one, ByOutput):  # which shares the inputs of the outputs
        return other.gram(one).T
    return one.gram(other)
