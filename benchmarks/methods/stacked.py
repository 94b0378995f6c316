"""Every quantity from stacked per-sample gradients, for libraries that give no more than those. Imports no framework.

Torch, NumPy and jax.numpy share the operators used here; what they spell differently comes from outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.methods.method import MAX_NORM


def reduce(
    stack: dict[str, Any],
    quantity: str,
    norm: Callable[[Any], Any],
    variance: Callable[[Any], Any],
    solve: Callable[[Any], Any],
) -> Any:
    """Reduce gradients by parameter name, each ``[B, *shape]``.

    Args:
        stack: the gradients.
        quantity: one of QUANTITIES.
        norm: Euclidean norms of the rows of a matrix.
        variance: over the first axis, with the suite's correction.
        solve: (K + λI)⁻¹ 1 for a matrix K, with the suite's damping λ.
    """
    if quantity == "stack":
        return stack
    if quantity == "mean":
        return {name: g.mean(0) for name, g in stack.items()}
    if quantity == "variance":
        return {name: variance(g) for name, g in stack.items()}
    rows = {name: g.reshape(len(g), -1) for name, g in stack.items()}
    if quantity == "gram":
        return sum(g @ g.T for g in rows.values())
    count = len(next(iter(rows.values())))
    if quantity == "natural_gradient":  # (F + λI)⁻¹ g for the mean g, solved in the space of samples
        weights = solve(sum(g @ g.T for g in rows.values()) / count) / count
    else:
        norms = sum(norm(g) ** 2 for g in rows.values()) ** 0.5
        if quantity == "norms":
            return norms
        weights = (MAX_NORM / norms).clip(None, 1.0) / count  # a norm of 0 gives ∞, clipped to 1
    return {name: (weights @ g).reshape(stack[name].shape[1:]) for name, g in rows.items()}
