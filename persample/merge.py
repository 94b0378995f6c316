"""What the partial results of chunks are made of, and how two of them become one.

A reduction lifts gradients into a tree of these leaves. Merging knows nothing of the reduction, so chunks (and later
batches and processes) are merged by the same few lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from persample.factors import Factor, concatenate
from persample.utils.dtypes import restore
from persample.utils.trees import leaf, tree_map


@leaf
@dataclass(frozen=True)
class Summed:
    """A sum over samples; two of them add.

    Args:
        value: the sum so far, real, in the dtype it is accumulated in.
        dtype: dtype of the finished result (complex for a complex parameter); None keeps the value's own.
    """

    value: Tensor
    dtype: torch.dtype | None = None

    def merge(self, other: Summed) -> Summed:
        """Return the sum over the samples of both."""
        return Summed(self.value + other.value, self.dtype)

    def finish(self, divisor: Tensor | None = None) -> Tensor:
        """Return the sum, divided before it is rounded to its final dtype."""
        # In place: a sum as large as the parameters belongs to nobody else, and new memory costs more than dividing.
        return restore(self.value if divisor is None else self.value.div_(divisor), self.dtype)


@dataclass(frozen=True)
class Moments:
    """Weight, mean and sum of squared deviations; two of them merge by Chan's formula.

    Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979).

    Args:
        n: total weight, 0-d.
        mean: weighted mean over the samples.
        m2: weighted sum of squared deviations from it, elementwise or (if of shape []) summed over all elements.
        dtype: dtype of the finished result, as in Summed.
    """

    n: Tensor
    mean: Tensor
    m2: Tensor
    dtype: torch.dtype | None = None

    def merge(self, other: Moments) -> Moments:
        """Return the moments of the samples of both."""
        n = self.n + other.n
        share = torch.where(n > 0, other.n / n, 0)  # two empty halves have no mean to move
        delta = other.mean - self.mean
        between = (delta.square() * (self.n * share)).sum_to_size(self.m2.shape)
        return Moments(n, self.mean + delta * share, self.m2 + other.m2 + between, self.dtype)


@leaf
@dataclass(frozen=True)
class Stacked:
    """Per-sample rows; two of them concatenate.

    Args:
        rows: a tensor with the batch axis first, or a factor.
        dtype: dtype of the finished rows, as in Summed.
        tail: the rows that follow, merged later in one concatenation.
    """

    rows: Tensor | Factor
    dtype: torch.dtype | None = None
    tail: tuple[Tensor | Factor, ...] = ()

    def merge(self, other: Stacked) -> Stacked:
        """Return the rows of this one followed by the rows of the other."""
        return Stacked(self.rows, self.dtype, (*self.tail, other.rows, *other.tail))

    def concatenated(self) -> Any:
        """Return all rows as one tensor, or one factor."""
        if not self.tail:
            return self.rows
        rows: list[Any] = [self.rows, *self.tail]
        return torch.cat(rows) if isinstance(self.rows, Tensor) else concatenate(rows)

    def fits(self, out: Any) -> bool:
        """Return whether something is a tensor like the finished rows."""
        shape = self.rows.shape[1:] if isinstance(self.rows, Tensor) else self.rows.shape
        dtype = self.rows.dtype if self.dtype is None else self.dtype
        size = sum(map(len, (self.rows, *self.tail)))
        wanted = (size, *(shape[:-1] if dtype.is_complex else shape)), dtype, self.rows.device
        return isinstance(out, Tensor) and (tuple(out.shape), out.dtype, out.device) == wanted

    def finish(self, out: Tensor | None = None) -> Tensor:
        """Return all rows as one tensor: ``out``, if they can be written straight into it."""
        rows = self.concatenated()
        if isinstance(rows, Tensor):
            return restore(rows, self.dtype)
        straight = rows.dtype == self.dtype and self.fits(out)
        return restore(rows.materialize(out if straight else None), self.dtype)


@dataclass(frozen=True)
class AnyOf:
    """A fact that holds for the whole if it holds for any part."""

    value: bool

    def merge(self, other: AnyOf) -> AnyOf:
        """Return whether it holds for either."""
        return AnyOf(self.value or other.value)


def merge(left: Any, right: Any) -> Any:
    """Merge two partial results of the same structure, leaf by leaf.

    Args:
        left: tree of leaves of this module, for the earlier samples.
        right: the same for the samples that follow.

    Returns:
        The tree for all of them.

    Examples:
        >>> a, b = Summed(torch.tensor(1.0)), Summed(torch.tensor(2.0))
        >>> merge({"loss": a}, {"loss": b})["loss"].finish()
        tensor(3.)
    """
    return tree_map(lambda a, b: a.merge(b), left, right)
