"""The one place that decides: keep a product of small tensors, or multiply it out; and how to take its norms."""

from __future__ import annotations

from collections.abc import Iterable

# A gradient larger than this is not written out for all samples only to be a little smaller than its factors.
_LARGE = 2**24
# Blocks of this many numbers stay in cache, and are large enough for matrix products at full speed.
BLOCK = 2**20


def keeps_product(uses: Iterable[str], steps: int, written: int, stored: int) -> bool:
    """Return whether a product is better kept than written out.

    A plain sum contracts all samples in one matrix product, and with T = 1 everything is products of small numbers,
    whatever the sizes. Else most reductions contract twice, so the smaller form is kept.

    Args:
        uses: the operations of ``Factor`` that the reductions call.
        steps: T.
        written: numbers in the written-out gradients of all samples.
        stored: numbers in the factors of all samples.

    Examples:
        >>> keeps_product({"squared_norms", "weighted_sum"}, steps=200, written=64 * 64, stored=200 * (64 + 64))
        False
    """
    wanted = set(uses)
    if "materialize" in wanted:
        return False
    return wanted <= {"weighted_sum"} or steps == 1 or written > stored or written > _LARGE


def gram_is_cheaper(steps: int, rows: int, columns: int) -> bool:
    """Return whether T² inner products in float64 (twice the cost of float32) beat writing out blocks in float32.

    Args:
        steps: T.
        rows: o.
        columns: i.
    """
    return 2 * steps * steps * (rows + columns) < steps * rows * columns
