"""The partial results of all processes, merged into one, with their rows in the order of the data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from persample.errors import ArgumentError, LossError
from persample.inputs import TotalWeight
from persample.merge import Moments, Stacked, Summed
from persample.processes import Processes, merged, one_by_one
from persample.reductions import CosineSimilarity, Gram, Reduction
from persample.streams.accumulator import Finished, Partial
from persample.utils import trees

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


def sorted_rows(merged: Any, places: Tensor | None) -> Any:
    """Return merged leaves with their rows in the order of the data set.

    Args:
        merged: a tree of leaves, the rows of all ranks one after the other.
        places: what ``positions`` returned.
    """
    if places is None:
        return merged

    def in_order(leaf: Any) -> Any:
        if not isinstance(leaf, Stacked):
            return leaf
        rows = leaf.concatenated()
        index = places.to(rows.device)
        return Stacked(rows[index] if isinstance(rows, Tensor) else rows.rows(index), leaf.dtype)

    return trees.tree_map(in_order, merged)


def merge_ranks(own: Partial, wanted: list[Reduction], order: Order, processes: Processes) -> Partial:
    """Return the partial result of the samples of all processes, the same on all; its rows are in data-set order.

    The processes first exchange what they hold, so that one without batches takes part with nothing, and one with
    results of another form is an error on all.

    Args:
        own: that of this process.
        wanted: the reductions whose leaves these are.
        order: how the data set is spread over the ranks.
        processes: the processes.

    Raises:
        LossError: if the results of the ranks differ in form.
        ArgumentError: if the order of the samples is not as said.
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
    kinds, pairs = (Gram, CosineSimilarity), enumerate(wanted)
    return [(place, one) for place, one in pairs if isinstance(one, Gram) and type(one) in kinds and one.other is None]


def _all_pairs(reduction: Gram, own: Any, places: Tensor | None, processes: Processes) -> Finished:
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


def _form(template: Any) -> str | None:
    if template is None:
        return None
    leaves, structure = trees.flatten(template)
    return " ".join(f"{structure}, {[_shape(leaf) for leaf in leaves]}".split())


def _shape(leaf: Any) -> str:
    if isinstance(leaf, Summed):
        return f"{list(leaf.value.shape)} {leaf.value.dtype}"
    if isinstance(leaf, Moments):
        return f"{list(leaf.mean.shape)} {leaf.mean.dtype}"
    if isinstance(leaf, Stacked):
        return f"[n, {', '.join(map(str, leaf.rows.shape[isinstance(leaf.rows, Tensor) :]))}] {leaf.rows.dtype}"
    return type(leaf).__name__


def _nothing_like(leaf: Any) -> Any:
    """Return the leaf of no samples; its numbers are stored once, however many there are."""

    def zeros(x: Tensor) -> Tensor:
        return x.new_zeros(()).expand(x.shape)

    if isinstance(leaf, Summed):
        return Summed(zeros(leaf.value), leaf.dtype)
    if isinstance(leaf, Moments):
        return Moments(zeros(leaf.n), zeros(leaf.mean), zeros(leaf.m2), leaf.dtype)
    if isinstance(leaf, Stacked):
        return Stacked(leaf.rows[:0] if isinstance(leaf.rows, Tensor) else leaf.rows.rows(slice(0)), leaf.dtype)
    return leaf
