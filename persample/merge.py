"""The mergeable leaves of partial results.

A reduction lifts the gradients of a chunk into a tree of these leaves. Merging depends on the leaves alone, so all
reductions share it, for chunks, batches and processes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from persample._torch import foreach_div_
from persample.errors import LossError
from persample.factors import Factor, concatenate
from persample.utils.numerics import is_sharded, restore
from persample.utils.tracing import are_plain
from persample.utils.trees import Leaf, Tree, TreeSpec, leaf, on_one_line, structure, tree_map

_BLOCK = 2**16  # elements that are merged at a time: with the results computed of them, they stay in a CPU's cache


@leaf
@dataclass(frozen=True)
class Summed:
    """A sum over samples; merging adds.

    Args:
        value: the sum so far, real, in the dtype of accumulation.
        dtype: the dtype of the finished result (complex for a complex parameter); None keeps that of ``value``.
    """

    value: Tensor
    dtype: torch.dtype | None = None

    def merge(self, other: Summed) -> Summed:
        """Return the sum over the samples of both leaves."""
        _check_shapes(self.value.shape, other.value.shape)
        return Summed(self.value + other.value, self.dtype)

    def widened(self) -> Summed:
        """Return a copy whose memory is its own, in float64, to which many parts can be added."""
        wide = torch.float64 if self.value.is_floating_point() else self.value.dtype
        value = self.value.to(wide, copy=True, memory_format=torch.contiguous_format)
        return Summed(value, self.dtype or self.value.dtype)

    def absorb(self, other: Summed) -> Summed:
        """Add the sum of another leaf to this one, in its memory, and return this leaf."""
        _check_shapes(self.value.shape, other.value.shape)
        for total, part in _blocks(self.value, other.value):
            total.add_(part)
        return self

    def finish(self, divisor: Tensor | None = None) -> Tensor:
        """Return the sum, divided before it is converted to its final dtype."""
        return divided([self], divisor)[0]


def divided(sums: Sequence[Summed], divisor: Tensor | None) -> list[Tensor]:
    """Return sums in their final dtypes, divided before they are converted."""
    values = [x.value for x in sums]
    if divisor is not None:  # in place: new memory costs more than the division
        if are_plain(values):
            foreach_div_(values, divisor)
        else:
            values = [x / divisor for x in values]
    return [x if x.dtype == one.dtype else restore(x, one.dtype) for x, one in zip(values, sums, strict=True)]


@leaf
@dataclass(frozen=True)
class Moments:
    """Weight, mean and sum of squared deviations; merging uses Chan's formula.

    Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979).

    Args:
        n: the total weight, 0-d.
        mean: the weighted mean over the samples.
        m2: the weighted sum of squared deviations from the mean, elementwise, or summed over all elements (shape []),
            or over those of each output (shape [K, 1, …]).
        dtype: the dtype of the finished result, as in Summed.
    """

    n: Tensor
    mean: Tensor
    m2: Tensor
    dtype: torch.dtype | None = None

    def merge(self, other: Moments) -> Moments:
        """Return the moments over the samples of both leaves."""
        _check_shapes(self.mean.shape, other.mean.shape)
        n, delta = self.n + other.n, other.mean - self.mean
        share = _share(other.n, n)
        between = (delta.square() * (self.n * share)).sum_to_size(self.m2.shape)
        return Moments(n, self.mean + delta * share, self.m2 + other.m2 + between, self.dtype)

    def widened(self) -> Moments:
        """Return a copy whose memory is its own, into which many parts can be merged."""
        n, mean, m2 = (x.clone(memory_format=torch.contiguous_format) for x in (self.n, self.mean, self.m2))
        return Moments(n, mean, m2, self.dtype)

    def absorb(self, other: Moments) -> Moments:
        """Merge another leaf into this one as ``merge`` does, in its memory, and return this leaf."""
        _check_shapes(self.mean.shape, other.mean.shape)
        n = self.n + other.n
        share = _share(other.n, n)
        between = self.n * share
        for mean, m2, other_mean, other_m2 in _blocks(self.mean, self.m2, other.mean, other.m2):
            delta = other_mean - mean
            mean.addcmul_(delta, share)
            m2.add_(other_m2).addcmul_(delta.square_().sum_to_size(m2.shape), between)
        self.n.copy_(n)
        return self

    def around(self, n: Tensor, total: Tensor) -> Moments:
        """Return this leaf's part of the moments of all, of weight n and sum ``total``: their n, their mean, its m2."""
        mean = torch.where(n > 0, total / n, 0)
        between = ((self.mean - mean).square() * self.n).sum_to_size(self.m2.shape)
        return Moments(n, mean, self.m2 + between, self.dtype)


@leaf
@dataclass(frozen=True)
class Stacked:
    """Per-sample rows; merging concatenates.

    Args:
        rows: a tensor with the batch axis first, or a factor.
        dtype: the dtype of the finished rows, as in Summed.
        tail: the rows of later leaves, which ``concatenated`` joins in one operation.
    """

    rows: Tensor | Factor
    dtype: torch.dtype | None = None
    tail: tuple[Tensor | Factor, ...] = ()

    def merge(self, other: Stacked) -> Stacked:
        """Return the rows of this leaf, followed by those of the other."""
        _check_shapes(_row_shape(self.rows), _row_shape(other.rows))
        return Stacked(self.rows, self.dtype, (*self.tail, other.rows, *other.tail))

    def concatenated(self) -> Tree:
        """Return all rows as one tensor, or one factor."""
        if not self.tail:
            return self.rows
        rows: list[Leaf] = [self.rows, *self.tail]
        return torch.cat(rows) if isinstance(self.rows, Tensor) else concatenate(rows)

    def at(self, places: Tensor | slice) -> Stacked:
        """Return the rows at some places, in their order."""
        rows = self.concatenated()
        index = places.to(rows.device) if isinstance(places, Tensor) else places
        return Stacked(rows[index] if isinstance(rows, Tensor) else rows.rows(index), self.dtype)

    def fits(self, out: object) -> bool:
        """Return whether ``out`` is a tensor of the shape, dtype and device of the finished rows."""
        shape = _row_shape(self.rows)
        dtype = self.rows.dtype if self.dtype is None else self.dtype
        size = sum(map(len, (self.rows, *self.tail)))
        expected = (size, *(shape[:-1] if dtype.is_complex else shape)), dtype, self.rows.device
        return isinstance(out, Tensor) and (tuple(out.shape), out.dtype, out.device) == expected

    def finish(self, out: Tensor | None = None) -> Tensor:
        """Return all rows as one tensor: a factor is materialized into ``out`` if that fits."""
        rows = self.concatenated()
        if isinstance(rows, Tensor):
            return restore(rows, self.dtype)
        target = out if rows.dtype == self.dtype and self.fits(out) else None
        return restore(rows.materialize(target), self.dtype)


def joined(parts: Iterable[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Return the rows of all parts, tensor by tensor."""
    columns = zip(*parts, strict=True)
    return tuple(functools.reduce(Stacked.merge, map(Stacked, rows)).concatenated() for rows in columns)


def _blocks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Return views that fit in a CPU's cache; small tensors, unlike shapes, DTensors and those of GPUs stay whole."""
    first = tensors[0]
    is_whole = first.device.type != "cpu" or first.numel() <= _BLOCK or is_sharded(first)
    if is_whole or len({x.shape for x in tensors}) > 1:
        return [tensors]
    return zip(*(x.reshape(-1).split(_BLOCK) for x in tensors), strict=True)


def _share(part: Tensor, n: Tensor) -> Tensor:
    """Return part / n, and 0 for leaves without samples; a clamp takes a quarter of the time of ``torch.where``."""
    return part / n.clamp_min(torch.finfo(n.dtype).tiny)


def check_alike(expected: TreeSpec, received: TreeSpec) -> None:
    """Reject leaves whose tree is another than that of earlier batches."""
    if expected is not received and expected != received:
        one, other = on_one_line(expected), on_one_line(received)
        raise LossError(f"expected results like those of earlier batches, {one}, received {other}.")


def _check_shapes(one: Sequence[int], other: Sequence[int]) -> None:
    """Reject results of several shapes, whose sums would broadcast."""
    if tuple(one) != tuple(other):
        raise LossError(
            f"loss_fn: expected results of one shape for all samples, received shapes {list(one)} and {list(other)}. "
            "For every sample return the same number of outputs (outputs='rows') and aux of the same shapes, and use "
            "layers as often (TermNorm())."
        )


def _row_shape(rows: Tensor | Factor) -> Sequence[int]:
    return rows.shape[1:] if isinstance(rows, Tensor) else rows.shape


@leaf
@dataclass(frozen=True)
class AnyOf:
    """A truth value; merging is a logical or."""

    value: bool

    def merge(self, other: AnyOf) -> AnyOf:
        """Return whether either value is true."""
        return AnyOf(self.value or other.value)


def merge(left: object, right: object) -> Tree:
    """Merge two partial results of the same structure, leaf by leaf."""
    try:
        return tree_map(lambda a, b: a.merge(b), left, right)
    except ValueError:  # of unlike trees
        check_alike(structure(left), structure(right))
        raise


def merge_all(partials: Iterable[Leaf]) -> Tree:
    """Merge partial results from left to right; at most two of them exist at a time."""
    return functools.reduce(merge, partials)
