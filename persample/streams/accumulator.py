"""The running total of a stream: sums and moments in float64, rows of samples one after the other.

The totals of all processes are merged into one, with their rows in the order of the data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from persample.errors import ArgumentError, LossError
from persample.factors import Factor
from persample.factors.factor import tensor_fields
from persample.inputs import TotalWeight
from persample.merge import AnyOf, Moments, Stacked, Summed, check_alike
from persample.processes import Processes, merged, one_by_one
from persample.reductions import CosineSimilarity, Gram, Reduction
from persample.utils import trees
from persample.utils.numerics import memory
from persample.utils.trees import Leaf, Tree


@dataclass(frozen=True)
class Partial:
    """The merged result of one process."""

    leaves: Tree
    count: int
    weight: TotalWeight


@dataclass(frozen=True)
class Finished:
    """A result that was computed while processes were merged; it replaces the leaves of its reduction."""

    value: Tensor


class Accumulator:
    """Merges parts one by one; memory is constant, except for rows of samples."""

    def __init__(self) -> None:
        self.structure: trees.TreeSpec | None = None
        self.leaves: list[Leaf] = []
        self.samples, self.weight = 0, TotalWeight()
        self._later_rows: list[list[Tensor | Factor]] = []

    def add(self, partial: object, inputs: list[Tensor]) -> None:
        """Merge the leaves of one part. Rows that share memory with ``inputs``, which may change later, are copied."""
        leaves, structure = trees.flatten(partial)
        if self.structure is None:
            self.structure = structure
            self.leaves = [None] * structure.num_leaves
            self._later_rows = [[] for _ in self.leaves]
        check_alike(self.structure, structure)
        taken = {memory(x) for x in inputs}
        for place, leaf in enumerate(leaves):
            self._merge(place, _own_rows(leaf, taken))

    def _merge(self, place: int, leaf: object) -> None:
        own = self.leaves[place]
        if own is None:
            self.leaves[place] = leaf.widened() if isinstance(leaf, Summed | Moments) else leaf
        elif isinstance(leaf, Summed | Moments):
            own.absorb(leaf)
        elif isinstance(leaf, Stacked):
            check_rows(row_format(own.rows), row_format(leaf.rows))
            self._later_rows[place].append(leaf.rows)
        else:
            self.leaves[place] = own.merge(leaf)

    def state(self) -> dict[str, Tensor]:
        """Return counts, weights and leaves as tensors by name; no leaf has rows."""
        total, least, given = self.weight.total, self.weight.least, self.weight.given
        weight = torch.tensor([total, least, given], dtype=torch.float64, device="cpu")
        state = {"samples": torch.tensor(self.samples, device="cpu"), "weight": weight}
        for place, leaf in enumerate(self.leaves):
            state |= {f"leaf-{place}-{name}": x for name, x in _numbers(leaf).items()}
        return state

    def load(self, partial: object, state: dict[str, Tensor]) -> None:
        """Restore what ``state`` returned."""
        self.add(partial, [])
        total, least, given = state["weight"].tolist()
        self.samples, self.weight = int(state["samples"]), TotalWeight(total, least, bool(given))
        for place, leaf in enumerate(self.leaves):
            new = {name: state[f"leaf-{place}-{name}"].to(x.device) for name, x in _numbers(leaf).items()}
            self.leaves[place] = AnyOf(bool(new["value"])) if isinstance(leaf, AnyOf) else replace(leaf, **new)

    def count(self, size: int, weights: Tensor | None) -> None:
        """Count the samples of a batch, and their weights."""
        self.samples += size
        self.weight = self.weight.merge(TotalWeight.of(weights, size))

    def partial(self) -> Partial:
        """Return the merged result so far."""
        if self.structure is None:
            return Partial(None, 0, self.weight)
        pairs = zip(self.leaves, self._later_rows, strict=True)
        leaves = [Stacked(x.rows, x.dtype, tuple(rows)) if isinstance(x, Stacked) else x for x, rows in pairs]
        return Partial(trees.unflatten(leaves, self.structure), self.samples, self.weight)


def _numbers(leaf: object) -> dict[str, Tensor]:
    """Return the fields of a leaf as tensors, by name."""
    if isinstance(leaf, AnyOf):
        return {"value": torch.tensor(leaf.value, device="cpu")}
    return tensor_fields(leaf)


def _own_rows(leaf: object, taken: set[int]) -> Tree:
    if not isinstance(leaf, Stacked):
        return leaf
    rows = leaf.rows
    tensors = [rows] if isinstance(rows, Tensor) else rows.tensors
    if taken.isdisjoint(map(memory, tensors)):
        return leaf
    return leaf.at(torch.arange(len(rows)))


def check_rows(expected: object, received: object) -> None:
    """Reject rows whose shape or dtype differs from that of earlier batches."""
    if expected != received:
        raise LossError(
            f"expected rows like those of earlier batches, {expected}, received {received}. Pad what the samples "
            "return (aux) to one shape, or ask for sums."
        )


def row_format(rows: Tree) -> str:
    """Return shape and dtype of one row of a tensor, of a factor, or of a column of a folder."""
    shape = rows.shape[1:] if isinstance(rows, Tensor) else rows.shape
    return f"shape {list(shape)}, {rows.dtype}"


Order: TypeAlias = Literal["interleaved", "contiguous"]
ORDERS = get_args(Order)


def positions(counts: Sequence[int], order: Order) -> Tensor | None:
    """Return where each sample of the data set is among the samples of all ranks, one rank after the other.

    Args:
        counts: the number of samples of each rank.
        order: "interleaved" if sample j of rank r is sample r + j · world of the data set, else "contiguous".

    Returns:
        One position per sample, or None if they are in order.

    Raises:
        ArgumentError: if no data set is interleaved into such counts.

    Examples:
        >>> positions([3, 2], "interleaved")
        tensor([0, 3, 1, 4, 2])
    """
    if order == "contiguous" or len(counts) == 1:
        return None
    total, world = sum(counts), len(counts)
    expected = [len(range(rank, total, world)) for rank in range(world)]
    if list(counts) != expected:
        fix = "Give rank r the samples r, r + world, …; or pass order='contiguous' if each rank has one piece."
        received = f"{list(counts)} samples on the ranks"
        raise ArgumentError.about("order", expected=f"{expected} for 'interleaved'", received=received, fix=fix)
    starts = torch.tensor([0, *counts[:-1]], device="cpu").cumsum(0)
    sample = torch.arange(total, device="cpu")
    return starts[sample % world] + sample // world


def sorted_rows(merged: object, places: Tensor | None) -> Tree:
    """Return merged leaves with their rows in the order of the data set."""
    if places is None:
        return merged

    def in_order(leaf: object) -> Tree:
        return leaf.at(places) if isinstance(leaf, Stacked) else leaf

    return trees.tree_map(in_order, merged)


def merge_ranks(own: Partial, wanted: list[Reduction], order: Order, processes: Processes) -> Partial:
    """Return the partial result of the samples of all processes, the same on all; its rows are in data-set order.

    The processes first exchange what they hold, so that one without batches takes part with nothing, and one with
    results of another form is an error on all.
    """
    if processes.group is None:
        return own
    template = None if own.leaves is None else trees.tree_map(_nothing_like, own.leaves)
    known = processes.gather_objects((_form(template), own.count, own.weight))
    forms, counts, weights = zip(*known, strict=True)
    distinct = {form for form in forms if form is not None}
    if len(distinct) > 1:
        listed = "; ".join(f"rank {rank}: {form}" for rank, form in enumerate(forms))
        raise LossError(f"{processes.called}: expected results of one form on all ranks, received {listed}.")
    weight = TotalWeight()
    for one in weights:
        weight = weight.merge(one)
    total = Partial(None, sum(counts), weight)
    if not distinct:
        return total
    leaves = own.leaves
    if None in forms:  # somebody has to make results of nothing
        templates = processes.gather_objects(template)
        leaves = next(one for one in templates if one is not None) if leaves is None else leaves
    has_rows = any(isinstance(leaf, Stacked) for leaf in trees.flatten(leaves)[0])
    places = positions(counts, order) if has_rows else None
    partials, connected = leaves
    pairs = {place: _all_pairs(reduction, partials[place], places, processes) for place, reduction in _pairwise(wanted)}
    others = [() if place in pairs else one for place, one in enumerate(partials)]
    others, connected = sorted_rows(merged((others, connected), processes), places)
    return Partial(([pairs.get(place, one) for place, one in enumerate(others)], connected), total.count, weight)


def _pairwise(wanted: Sequence[Reduction]) -> list[tuple[int, Gram]]:
    """Return the reductions of all pairs of samples of the stream; other kinds of Gram may do more in ``finish``."""
    kinds = Gram, CosineSimilarity
    found = [(place, one) for place, one in enumerate(wanted) if isinstance(one, Gram) and type(one) in kinds]
    return [(place, one) for place, one in found if one.other is None and one.rows != "own"]


def _all_pairs(reduction: Gram, own: object, places: Tensor | None, processes: Processes) -> Finished:
    """Return the result for all pairs of samples, without all factors in one process.

    Each process computes its rows, against the factors of one process after the other. Then the rows are gathered.
    """
    blocks = [reduction.block(own, theirs) for theirs in one_by_one(own, processes)]
    columns = blocks[0].ndim // 2  # the samples' axis there: 1, or 2 after that of the outputs
    matrix = merged(Stacked(torch.cat(blocks, columns)), processes).concatenated()
    if places is not None:
        places = places.to(matrix.device)
        matrix = matrix[places].index_select(columns, places)
    return Finished(matrix)


def _form(template: object) -> str | None:
    if template is None:
        return None
    leaves, structure = trees.flatten(template)
    return " ".join(f"{structure}, {[_shape(leaf) for leaf in leaves]}".split())


def _shape(leaf: object) -> str:
    if isinstance(leaf, Summed):
        return f"{list(leaf.value.shape)} {leaf.value.dtype}"
    if isinstance(leaf, Moments):
        return f"{list(leaf.mean.shape)} {leaf.mean.dtype}"
    if isinstance(leaf, Stacked):
        return f"[n, {', '.join(map(str, leaf.rows.shape[isinstance(leaf.rows, Tensor) :]))}] {leaf.rows.dtype}"
    return type(leaf).__name__


def _nothing_like(leaf: object) -> Tree:
    """Return the leaf of no samples, whose elements are one stored zero."""

    def zeros(x: Tensor) -> Tensor:
        return x.new_zeros(()).expand(x.shape)

    if isinstance(leaf, Summed):
        return Summed(zeros(leaf.value), leaf.dtype)
    if isinstance(leaf, Moments):
        return Moments(zeros(leaf.n), zeros(leaf.mean), zeros(leaf.m2), leaf.dtype)
    if isinstance(leaf, Stacked):
        return Stacked(leaf.rows, leaf.dtype).at(slice(0))
    return leaf
