"""The quantities, and the check of a result. NumPy only, so that workers of all environments can import it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

COMMON = ("stack", "mean", "norms", "clipped_mean", "gram", "variance")
QUANTITIES = (*COMMON, "natural_gradient")  # the last of few libraries only
# The largest error, relative to the largest value of the parameter, that float32 explains: torch's own norm of 13
# million numbers has an error of 1e-3, and a variance is a small difference.
TOLERANCE = dict.fromkeys(QUANTITIES, 5e-3) | {"variance": 1e-2}
# Larger stacks are checked in evenly spaced rows.
CHECKED_NUMBERS = 2**24

Arrays = Mapping[str, np.ndarray] | np.ndarray


def checked_rows(batch_size: int, params: int) -> list[int]:
    """Return the rows of a stack to check: all, or evenly spaced ones including the first and the last."""
    count = min(batch_size, max(2, CHECKED_NUMBERS // params))
    return [round(i) for i in np.linspace(0, batch_size - 1, count)]


def agrees(result: Arrays, truth: Arrays, quantity: str) -> tuple[float, str | None]:
    """Compare a result with the reference.

    Args:
        result: arrays by parameter name, or one array.
        truth: the reference in float64; for a stack, the rows of ``checked_rows``.
        quantity: the name of the quantity.

    Returns:
        The largest error, relative to the largest value of each parameter (or to a thousandth of the largest value of
        all, where that is more); and what is wrong, or None.
    """
    found, expected = (dict(x) if isinstance(x, Mapping) else {"result": x} for x in (result, truth))
    if found.keys() != expected.keys():
        return math.inf, f"has the parameters {sorted(found)}, not {sorted(expected)}"
    if quantity == "stack":
        params = sum(math.prod(value.shape[1:]) for value in expected.values())
        found = {name: value[checked_rows(len(value), params)] for name, value in found.items()}
    for name, value in expected.items():
        if found[name].shape != value.shape:
            return math.inf, f"has the shape {list(found[name].shape)} for {name!r}, not {list(value.shape)}"
    error = _largest_error(found, expected)
    if error <= TOLERANCE[quantity]:
        return error, None
    return error, f"differs from the loop in float64 by {error:.1g} of the largest value"


def _largest_error(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    scales = {name: float(np.abs(value).max(initial=0.0)) for name, value in expected.items()}
    floor = 1e-3 * max(scales.values())
    errors = [_ratio(np.abs(found[name] - value), max(scales[name], floor)) for name, value in expected.items()]
    return float(np.max(errors))  # NaN stays NaN, and fails every comparison


def _ratio(differences: np.ndarray, scale: float) -> float:
    largest = float(differences.max(initial=0.0))
    return largest if largest == 0 else largest / scale if scale else math.inf
