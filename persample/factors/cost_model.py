"""The one place that decides: keep a product of small tensors, or multiply it out; and how to take its norms."""

from __future__ import annotations

from collections.abc import Iterable

from persample.utils.tracing import current_trace

# A gradient larger than this is not written out for all samples only to be a little smaller than its factors.
_LARGE = 2**24
# Blocks of this many numbers stay in cache, and are large enough for matrix products at full speed.
BLOCK = 2**20
_SMALL = 2 * BLOCK


def keeps_product(uses: Iterable[str], num_terms: int, written: int, stored: int, *, by_gram: bool = True) -> bool:
    """Return whether a product is better kept than written out.

    A plain sum contracts all samples in one matrix product, and with T = 1 everything is products of small numbers,
    whatever the sizes. Else most reductions contract twice, so the smaller form is kept; but what is small, and written
    out to be squared anyway, is written once.

    Args:
        uses: the operations of ``Factor`` that the reductions call.
        num_terms: T.
        written: numbers in the written-out gradients of all samples.
        stored: numbers in the factors of all samples.
        by_gram: whether norms are taken from inner products, without writing anything out.

    Examples:
        >>> keeps_product({"squared_norms", "weighted_sum"}, num_terms=200, written=64 * 64, stored=200 * (64 + 64))
        False
    """
    wanted = set(uses)
    if "materialize" in wanted:
        return False
    if wanted <= {"weighted_sum"} or num_terms == 1 or written > _LARGE:
        return True
    squared = len(wanted) > 1 and not by_gram and wanted & {"squared_norms", "second_moment"}
    return written > stored and (written > _SMALL or not squared)


def gram_is_cheaper(num_terms: int, rows: int, columns: int) -> bool:
    """Return whether T² inner products in float64 (twice the cost of float32) beat writing out blocks in float32.

    Args:
        num_terms: T.
        rows: o.
        columns: i.
    """
    return 2 * num_terms * num_terms * (rows + columns) < num_terms * rows * columns


def rows_at_a_time(count: int, each: int, share: int = 1) -> int:
    """Return how many rows to write out at a time: a block, or all of them in a program for any number of samples.

    Args:
        count: how many there are.
        each: numbers in one row.
        share: how many blocks' worth may be written.
    """
    trace = current_trace()
    if trace is not None and trace.any_size:
        trace.block_sizes.append(count * each)
        return max(1, count)
    return max(1, share * BLOCK // max(1, each))


def is_small(numbers: float) -> bool:
    """Return whether so many numbers may be written out at once."""
    return numbers <= _LARGE
