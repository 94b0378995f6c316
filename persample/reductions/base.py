"""What a reduction is: two functions, and what it refuses at the door."""

from __future__ import annotations

from typing import Any

from persample.errors import ArgumentError
from persample.gradients import Gradients, ParamSpec


class Reduction:
    """What is asked of the per-sample gradients.

    A reduction is a frozen dataclass with two methods. ``lift`` turns the gradients of one chunk into a tree of
    mergeable leaves (``Summed``, ``Moments``, ``Stacked`` of ``persample.merge``); ``finish`` turns that tree, merged
    over all chunks, into the result. ``divides_by_weight`` says that the result is an average, so that a call whose
    weights are negative or sum to ``needs_more_than`` or less is refused before anything is computed.
    """

    divides_by_weight = False

    @property
    def needs_more_than(self) -> float:
        """The total weight that an average must exceed."""
        return 0.0

    def check(self, spec: ParamSpec) -> None:
        """Refuse what does not fit the parameters.

        Args:
            spec: structure, names, shapes and dtypes of the parameters.
        """

    def lift(self, gradients: Gradients) -> Any:
        """Return the mergeable tree of one chunk.

        Args:
            gradients: the gradients of the chunk.
        """
        raise NotImplementedError

    def finish(self, merged: Any) -> Any:
        """Return the result.

        Args:
            merged: what ``lift`` returned, merged over all chunks.
        """
        raise NotImplementedError


def checked_bound(max_norm: Any) -> None:
    """Refuse a clipping bound that is not a number in [0, ∞].

    Args:
        max_norm: what the caller passed.

    Raises:
        ArgumentError: if it is negative, NaN or not a number.
    """
    try:
        valid = float(max_norm) >= 0
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise ArgumentError.about(
            "max_norm",
            expected="a number >= 0 (inf clips nothing)",
            received=repr(max_norm),
            fix="Pass the largest norm one sample may contribute.",
        )
