"""The argument ``reduce``."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from persample.errors import ArgumentError
from persample.reductions import Reduction, Stack
from persample.utils import trees


def reductions(reduce: Any) -> tuple[list[Reduction], trees.TreeSpec]:
    """Return the reductions of a call as a list, and the structure of their container.

    Args:
        reduce: a reduction, None, or a container of them.

    Raises:
        ArgumentError: if there is no reduction, or if a leaf is not a reduction.
    """
    leaves, container = trees.flatten(reduce)
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, Reduction):
            named = isinstance(leaf, type) and issubclass(leaf, Reduction)
            fix = f"Call it: {leaf.__name__}(…)." if named else "Pass for example Mean(), or {'update': Mean()}."
            received = repr(leaf)
            if isinstance(leaf, Tensor | np.ndarray):
                received = f"a tensor of shape {list(leaf.shape)}"
                fix = "All that the loss takes of a sample is one argument, batch: pass (x, y), not x, y."
            raise ArgumentError.about("reduce", expected="reductions such as Mean()", received=received, fix=fix)
    if not leaves:
        fix = "Name at least one, or pass None for the per-sample gradients."
        raise ArgumentError.about("reduce", expected="a reduction", received=f"an empty {reduce!r}", fix=fix)
    return [Stack() if leaf is None else leaf for leaf in leaves], container
