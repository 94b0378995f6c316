"""The cost model: whether gradients are stored as factors or written out, and how factors compute norms."""

from __future__ import annotations

from collections.abc import Iterable

from persample.utils.tracing import current_trace

# Gradients of more elements are stored as factors, also where these are a little larger.
_LARGE = 2**24
# Blocks of this many elements stay in cache, and are large enough for matrix products at full speed.
BLOCK = 2**20
_SMALL = 2 * BLOCK


def reason_to_write_out(
    required_ops: Iterable[str], num_terms: int, written: int, stored: int, *, costly_to_square: bool = False
) -> str:
    """Return why the gradients of a parameter are written out, or "" where they are stored as a factor.

    A factor needs one matrix product for a weighted sum, and with T = 1 only products of small tensors for anything.
    Otherwise the smaller form is stored; small gradients that are squared beside another operation are written out.

    Args:
        required_ops: the operations of ``Factor`` that the reductions call.
        num_terms: T.
        written: the number of elements in the written-out gradients of all samples.
        stored: the number of elements in the factor of all samples.
        costly_to_square: see ``Factor.is_costly_to_square``.

    Examples:
        >>> ops = {"squared_norms", "weighted_sum"}
        >>> reason_to_write_out(ops, num_terms=200, written=64 * 64, stored=200 * (64 + 64))
        'no larger than its factors'
    """
    ops = set(required_ops)
    if "materialize" in ops:
        return "a reduction asks for the gradients themselves"
    if ops <= {"weighted_sum"} or num_terms == 1 or written > _LARGE:
        return ""
    if written <= stored:
        return "no larger than its factors"
    squared = costly_to_square and len(ops) > 1 and ops & {"squared_norms", "second_moment"}
    return "small, and written out to be squared anyway" if squared and written <= _SMALL else ""


def gram_is_cheaper(num_terms: int, rows: int, columns: int) -> bool:
    """Return whether T² inner products in float64 (twice the cost of float32) cost less than blocks in float32.

    Args:
        num_terms: T.
        rows: o.
        columns: i.
    """
    return 2 * num_terms * num_terms * (rows + columns) < num_terms * rows * columns


def rows_per_block(count: int, each: int, num_blocks: int = 1) -> int:
    """Return the number of rows that are written out at a time: all, in a program for any number of samples.

    Args:
        count: the number of rows.
        each: the number of elements in one row.
        num_blocks: the number of blocks that may be written out at a time.
    """
    trace = current_trace()
    if trace is not None and trace.any_size:
        trace.block_sizes.append(count * each)
        return max(1, count)
    return max(1, num_blocks * BLOCK // max(1, each))


def is_for_any_size() -> bool:
    """Return whether a program for any number of samples is being traced."""
    trace = current_trace()
    return trace is not None and trace.any_size


def fits_at_once(written: float) -> bool:
    """Return whether so many elements may be written out at once."""
    return written <= _LARGE
