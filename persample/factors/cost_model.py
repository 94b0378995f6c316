"""The cost model: the estimated time of each way to store and contract the gradients of one parameter.

A gradient Σₜ lₜ rₜᵀ is kept as a factor, or written out. The time of either way is estimated from multiply-adds in
products, from elements read or written, and from the rates of the device. Written-out gradients take memory, which is
bounded in units of what the factor takes: that is the layer's inputs and output gradients.

    E = B·o·i      elements of the written-out gradients of all samples (``written``)
    S = B·T·(o+i)  elements of the factor (``stored``)
    T·E            multiply-adds of a product in a batch gradient
    T·S            multiply-adds of inner products of all pairs of a sample's terms
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias

import torch

from persample.utils.tracing import current_trace


class Op(str, Enum):
    """The operations of ``Factor`` that reductions name in ``uses``: members are named as its methods.

    ``gram`` covers ``own_gram`` and ``trace_gram``. ``term_norms`` asks engines for ``Gradients.term_norms``; with
    ``kronecker`` no factor is written out.
    """

    materialize = "materialize"
    squared_norms = "squared_norms"
    weighted_sum = "weighted_sum"
    second_moment = "second_moment"
    gram = "gram"
    dot = "dot"
    project = "project"
    sketch = "sketch"
    term_norms = "term_norms"
    kronecker = "kronecker"


# Blocks of this many elements stay in a CPU's cache, and take longer than the operations around them. Of half as many,
# norms take 10 to 20 % longer (Intel Xeon with AVX-512, torch 2.13). Copies in float64 are of half as many.
BLOCK = 2**20
# On other devices a block must take longer than the launch of its kernels. An H200 takes 4 to 12 times as long with the
# blocks of a CPU, and 5 to 15 % longer with these than with the largest.
_LARGE_BLOCK = 2**23
# Blocks of copies in a trace.
_MOST_BLOCKS = 4
# A program for any number of samples writes out no more elements at once.
AT_ONCE = 2**24
# Memory for more elements comes from the operating system each time (beyond glibc's 32 MiB, in float32).
_KEPT = 2**23
# So does that of all written-out gradients together, beyond these bytes: glibc keeps twice the largest of them.
_KEPT_BYTES = 2**24
# Norms of sums of more terms are in float64: cancellation is the larger, the more terms there are.
MOST_TERMS_IN_FLOAT32 = 50


class Rates(NamedTuple):
    """Seconds per elementary operation."""

    product: float  # of a multiply-add in a matrix product in float32
    product64: float  # the same in float64
    number: float  # to read or write a number


# Only ratios matter. CPU: least squares over 156 sizes, one core of an Intel Xeon (Sapphire Rapids), torch 2.13.
# Other devices: the same over 364 times of an NVIDIA H200, torch 2.11, whose float64 is as fast as its float32.
_CPU, _GPU = Rates(1.4e-11, 3.9e-11, 2e-10), Rates(5e-14, 4.5e-14, 7e-13)


class Work(NamedTuple):
    """The work of one operation."""

    products: float = 0  # multiply-adds in units of T·E, in float32
    products64: float = 0  # the same in float64
    inner: float = 0  # inner products of all pairs of terms
    written: float = 0  # elements read or written, in units of E
    stored: float = 0  # the same, in units of S


# The products of each number with the signs of some hundred projections, in passes over memory; of sketches a few.
_SIGNS = 8
# Fitted with the rates. Norms accumulate in float64; second moments, and sums beside them, are computed in it.
_WRITING, _IN_FRESH_MEMORY = Work(products=1, written=1, stored=1), Work(written=4)
_OF_FACTORS = {
    Op.squared_norms: Work(products=1, written=2.5, stored=1),  # in blocks
    Op.weighted_sum: Work(products=1, stored=2),
    Op.second_moment: Work(products=1, written=8, stored=1),
    "sum in float64": Work(products64=1, written=4, stored=7),
    Op.dot: Work(products=1, stored=1),
    Op.gram: Work(products=1, written=3, stored=1),
    Op.project: Work(stored=_SIGNS),
    Op.sketch: Work(stored=2),
}
_OF_WRITTEN = {
    Op.squared_norms: Work(written=2),
    Op.weighted_sum: Work(written=1),
    Op.second_moment: Work(written=20),
    "sum in float64": Work(written=10),
    Op.dot: Work(written=1),
    Op.gram: Work(written=3),
    Op.project: Work(written=_SIGNS),
    Op.sketch: Work(written=2),
}
_INNER_PRODUCTS = Work(inner=1)  # norms that write no gradient out
# Passes over memory: operands read, results written; float64 adds a conversion.
_INNER_PASSES, _INNER_PASSES64 = 3, 8
# Gradients no larger than their factor stay one where operations on it take less than this part of the time.
_MUCH_FASTER = 0.75
# A multiply-add of inner products of one sample takes so many times that of a large product.
_INNER_SLOWDOWN = 2


class Size(NamedTuple):
    """The size of the gradients of one parameter."""

    num_terms: int  # T
    written: float  # E, the number of elements in the written-out gradients of all samples
    stored: float  # the number of elements in the factor of all samples
    device: str = "cpu"
    operands: float | None = None  # S, the number of elements that products read, where these are not the stored ones
    # the multiply-adds of inner products of all pairs of terms, and the number of elements that they read, where these
    # are not T·S and S; they are in float64
    inner: tuple[float, float] | None = None

    def seconds(self, *works: Work) -> float:
        """Return the estimated time of some work."""
        rates = _CPU if self.device == "cpu" else _GPU
        products, products64, inner, written, stored = map(sum, zip(*works, strict=True))
        terms, operands = self.num_terms, self.stored if self.operands is None else self.operands
        return (
            (products * rates.product + products64 * rates.product64) * terms * self.written
            + (inner * self._seconds_of_inner_products(rates, operands) if inner else 0)
            + (written * self.written + stored * operands) * rates.number
        )

    def _seconds_of_inner_products(self, rates: Rates, operands: float) -> float:
        products, read = (self.num_terms * operands, operands) if self.inner is None else self.inner
        if self.inner is None and self.device == "cpu" and self.num_terms <= MOST_TERMS_IN_FLOAT32:
            return products * _INNER_SLOWDOWN * rates.product + _INNER_PASSES * read * rates.number
        return products * rates.product64 + _INNER_PASSES64 * read * rates.number


def inner_products_are_faster(size: Size) -> bool:
    """Return whether norms from inner products of terms take less time than blocks of written-out gradients."""
    return size.seconds(_INNER_PRODUCTS) < size.seconds(_OF_FACTORS[Op.squared_norms])


class Estimate(NamedTuple):
    """The estimated seconds of both ways."""

    contract: float
    write_out: float


@dataclass(frozen=True)
class Plan:
    """How the gradients of each parameter are stored for some operations.

    Examples:
        >>> plan = Plan(frozenset({Op.squared_norms, Op.weighted_sum}))
        >>> size = Size(200, written=64 * 64, stored=200 * (64 + 64))
        >>> plan.reason_to_write_out(size)
        'no larger than its factors'
        >>> times = plan.estimate(size)
        >>> round(times.contract / times.write_out, 1)
        2.0
    """

    required_ops: frozenset[str]  # the operations of ``Factor`` that the reductions call
    allowance: float = 2.0  # written-out gradients may have this many times the elements of their factor
    in_fresh_memory: bool = False  # whether written-out gradients always are in new memory of the system
    kept: float = _KEPT  # the number of elements in the gradients of one parameter above which it always does

    def estimate(self, size: Size) -> Estimate:
        """Return the estimated time of the operations on a sum of products, and on the written-out gradients."""
        ops = sorted(self.required_ops & _OF_FACTORS.keys())
        if {Op.second_moment, Op.weighted_sum} <= self.required_ops:
            ops[ops.index(Op.weighted_sum)] = "sum in float64"
        works = [_OF_FACTORS[op] for op in ops]
        if Op.squared_norms in ops and inner_products_are_faster(size):
            works[ops.index(Op.squared_norms)] = _INNER_PRODUCTS
        # Blocks of patches of convolutions take more time than is estimated, and more than fresh memory.
        has_patches = size.operands not in (None, size.stored)
        is_fresh = size.device == "cpu" and (size.written > self.kept or (self.in_fresh_memory and not has_patches))
        writing = [_WRITING, _IN_FRESH_MEMORY] if is_fresh else [_WRITING]
        return Estimate(size.seconds(Work(), *works), size.seconds(*writing, *map(_OF_WRITTEN.__getitem__, ops)))

    def always_keeps(self, num_terms: int) -> bool:
        """Return whether gradients of any size stay factors: at T = 1 all operations are small products."""
        if Op.kronecker in self.required_ops:
            return True
        return self.required_ops <= {Op.weighted_sum, Op.sketch} or (
            num_terms == 1 and Op.materialize not in self.required_ops
        )

    def reason_to_write_out(self, size: Size, *, is_product: bool = True) -> str:
        """Return why the gradients of a parameter are written out, or "" where they are stored as a factor."""
        if self.always_keeps(size.num_terms):
            return ""
        if Op.materialize in self.required_ops:
            return "a reduction asks for the gradients themselves"
        if size.written > self.allowance * size.stored:
            return ""
        times = self.estimate(size)
        if size.written <= size.stored and not (is_product and times.contract < _MUCH_FASTER * times.write_out):
            return "no larger than its factors"
        return "one product instead of two" if is_product and times.write_out < times.contract else ""


_USUAL_BYTES = 2**28
# The argument ``memory``: bytes, "low" for none beyond the factors, None for the usual.
Memory: TypeAlias = int | Literal["low"] | None


class Budget(NamedTuple):
    """The memory for written-out gradients, as ``Plan`` takes it."""

    allowance: float  # they may have this many times the elements of their factor
    in_fresh_memory: bool = False  # whether their memory comes from the operating system each time
    kept: float = _KEPT  # the number of elements in the gradients of one parameter above which it always does


def budget(memory: Memory, needed: float) -> Budget:
    """Return the memory for written-out gradients, which take ``needed`` bytes for all parameters.

    ``memory`` is the bytes that they may take; "low" for none beyond the factors; None for 256 MiB, or else twice the
    factors.
    """
    in_fresh_memory = needed > _KEPT_BYTES
    if memory != "low" and needed <= (_USUAL_BYTES if memory is None else memory):
        return Budget(math.inf, in_fresh_memory)
    return Budget(2.0 if memory is None else 1.0, in_fresh_memory)


def block_size(device: torch.device) -> int:
    """Return how many elements are written out at a time."""
    return BLOCK if device.type == "cpu" else _LARGE_BLOCK


def rows_per_block(count: int, each: int, device: torch.device, num_blocks: float = 1) -> int:
    """Return the number of rows that are written out at a time: all, in a program for any number of samples."""
    trace = current_trace()
    if trace is not None and trace.any_size:
        trace.block_sizes.append(count * each)
        return max(1, count)
    return max(1, int(num_blocks * block_size(device)) // max(1, each))


def rows_in_cache(count: int, each: int, device: torch.device) -> int:
    """Return the number of rows whose float64 copies stay in a CPU's cache; few blocks in a trace, one on a GPU."""
    if device.type != "cpu" or is_for_any_size():
        return max(1, count)
    step = max(1, BLOCK // 2 // max(1, each))
    return step if current_trace() is None else max(step, math.ceil(count / _MOST_BLOCKS))


def is_for_any_size() -> bool:
    """Return whether a program for any number of samples is being traced."""
    trace = current_trace()
    return trace is not None and trace.any_size
