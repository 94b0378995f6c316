"""One factor for the samples of several chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from persample.factors.base import Factor
from persample.factors.dense import Dense


def concatenate(factors: Sequence[Factor]) -> Factor:
    """Return one factor for the samples of all. Unlike kinds are written out.

    Args:
        factors: at least one.

    Examples:
        >>> concatenate([Dense(torch.ones(2, 3)), Dense(torch.ones(1, 3))]).materialize().shape
        torch.Size([3, 3])
    """
    kinds = {type(factor) for factor in factors}
    joined = kinds.pop().concatenate(factors) if len(kinds) == 1 else None
    if joined is not None:
        return joined
    return Dense(torch.cat([factor.materialize() for factor in factors]), outputs=factors[0].outputs)
