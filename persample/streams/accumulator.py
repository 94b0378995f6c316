"""The running total of a stream: sums and moments in float64, rows of samples one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from persample.engines import Total
from persample.errors import LossError
from persample.factors import Factor
from persample.factors.base import tensor_fields
from persample.inputs import TotalWeight
from persample.merge import AnyOf, Moments, Stacked, Summed, check_alike
from persample.utils import trees
from persample.utils.numerics import memory


@dataclass(frozen=True)
class Partial:
    """What one process knows after its last batch.

    Args:
        leaves: the merged leaves, or None if there was no batch.
        count: the number of samples.
        weight: their weights.
    """

    leaves: Any
    count: int
    weight: TotalWeight


@dataclass(frozen=True)
class Finished:
    """A result that merging the processes gave already, in place of the leaves of its reduction."""

    value: Tensor


class Accumulator:
    """Merges the leaves of one part after the other; memory does not grow with their number, but for rows."""

    def __init__(self) -> None:
        self.structure: trees.TreeSpec | None = None
        self.leaves: list[Any] = []
        self.samples, self.weight = 0, TotalWeight()
        self.total: Total | None = None
        self._later_rows: list[list[Tensor | Factor]] = []

    def add(self, partial: Any, inputs: list[Tensor]) -> None:
        """Merge the leaves of one part.

        Args:
            partial: the tree of its leaves.
            inputs: the tensors that the loss was called with, and weights. Rows that share memory with them are
                copied: the source of the batches may write there again.

        Raises:
            LossError: if the part does not fit the earlier ones.
        """
        leaves, structure = trees.flatten(partial)
        self._merge_all(enumerate(leaves), structure, inputs)

    def take(self, merged: tuple[Total, list[Any]], inputs: list[Tensor]) -> None:
        """Take the total that a part was merged into.

        Args:
            merged: the total of all parts, and the leaves of the last one that are not in it, in order.
            inputs: as in ``add``.
        """
        self.total, others = merged
        places = [place for place, leaf in enumerate(self.total.outline.leaves) if leaf is None]
        self._merge_all(zip(places, others, strict=True), self.total.outline.structure, inputs)

    def _merge_all(self, pairs: Iterable[tuple[int, Any]], structure: trees.TreeSpec, inputs: list[Tensor]) -> None:
        """Merge leaves at their places; the structure of the first part is that of all."""
        if self.structure is None:
            self.structure = structure
            self.leaves = [None] * structure.num_leaves
            self._later_rows = [[] for _ in self.leaves]
        check_alike(self.structure, structure)
        taken = {memory(x) for x in inputs}
        for place, leaf in pairs:
            self._merge(place, _own_rows(leaf, taken))

    def _merge(self, place: int, leaf: Any) -> None:
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
        """Return all numbers as tensors by name; none of the leaves has rows."""
        total, least, given = self.weight.total, self.weight.least, self.weight.given
        weight = torch.tensor([total, least, given], dtype=torch.float64, device="cpu")
        state = {"samples": torch.tensor(self.samples, device="cpu"), "weight": weight}
        for place, leaf in enumerate(self.leaves):
            state |= {f"leaf-{place}-{name}": x for name, x in _numbers(leaf).items()}
        return state

    def load(self, partial: Any, state: dict[str, Tensor]) -> None:
        """Take the numbers that ``state`` returned.

        Args:
            partial: the tree of the leaves of no samples.
            state: the numbers.
        """
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
        """Return all that was merged."""
        if self.structure is None:
            return Partial(None, 0, self.weight)
        if self.total is not None:
            pairs = zip(self.leaves, self.total.leaves, strict=True)
            self.leaves = [old if new is None else new for old, new in pairs]
        pairs = zip(self.leaves, self._later_rows, strict=True)
        leaves = [Stacked(x.rows, x.dtype, tuple(rows)) if isinstance(x, Stacked) else x for x, rows in pairs]
        return Partial(trees.unflatten(leaves, self.structure), self.samples, self.weight)


def _numbers(leaf: Any) -> dict[str, Tensor]:
    """Return the numbers of a leaf as tensors, by the names of their fields."""
    if isinstance(leaf, AnyOf):
        return {"value": torch.tensor(leaf.value, device="cpu")}
    return tensor_fields(leaf)


def _own_rows(leaf: Any, taken: set[int]) -> Any:
    if not isinstance(leaf, Stacked):
        return leaf
    rows = leaf.rows
    tensors = [rows] if isinstance(rows, Tensor) else rows.tensors
    if taken.isdisjoint(map(memory, tensors)):
        return leaf
    everyone = torch.arange(len(rows), device=tensors[0].device)
    return Stacked(rows[everyone] if isinstance(rows, Tensor) else rows.rows(everyone), leaf.dtype)


def check_rows(expected: object, received: object) -> None:
    """Reject rows that differ from those of earlier batches in their formats, which messages list."""
    if expected != received:
        raise LossError(
            f"expected rows like those of earlier batches, {expected}, received {received}. Pad what the samples "
            "return (aux) to one shape, or ask for sums."
        )


def row_format(rows: Any) -> str:
    """Return shape and dtype of one row of a tensor, of a factor, or of a column of a folder."""
    shape = rows.shape[1:] if isinstance(rows, Tensor) else rows.shape
    return f"shape {list(shape)}, {rows.dtype}"
