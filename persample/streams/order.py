"""The order of the samples of several processes in the data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.merge import Stacked
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
