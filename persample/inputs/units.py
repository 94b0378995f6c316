"""The units of a call: which samples belong to one user, prompt or image, and in which order they are computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.reductions import Reduction
from persample.utils import trees
from persample.utils.tracing import is_batched, is_wrapped
from persample.utils.trees import Leaf, Tree

UnitReduce: TypeAlias = Literal["sum", "mean"]
Ids: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.int64]]"
# Units are padded to one size where that takes at most so many times their own samples; four times, where what is added
# has few elements, which takes less time than another pass over the parameters.
_MOST_PADDING, _MOST_OF_FEW, _FEW = 2, 4, 2**19


@dataclass(frozen=True)
class Units:
    """Units of consecutive samples."""

    sizes: int | tuple[int, ...]  # the number of samples in each unit, one number where all have the same
    scale: float = 1.0  # what the gradients of all samples are multiplied with, beside their weights
    ids: Tensor | None = None  # the id of each unit, ``[U]``; None where no reduction returns them
    most: int | None = None  # the samples processed at a time, which one unit may exceed; None for all

    def count(self, size: int) -> int:
        """Return U, the number of units of a number of samples."""
        return size // self.sizes if isinstance(self.sizes, int) else len(self.sizes)

    def split(self, size: int, most: int) -> Iterator[tuple[slice, Units]]:
        """Split a number of samples into chunks of whole units, of at most ``most`` samples unless one has more."""
        sizes = self.of_each(size)
        first = start = total = 0
        for unit, own in enumerate(sizes):
            if total and total + own > most:
                yield slice(start, start + total), self._some(slice(first, unit), sizes, most)
                first, start, total = unit, start + total, 0
            total += own
        yield slice(start, start + total), self._some(slice(first, None), sizes, most)

    def of_each(self, size: int) -> tuple[int, ...]:
        """Return the number of samples in each unit."""
        return (self.sizes,) * self.count(size) if isinstance(self.sizes, int) else self.sizes

    def _some(self, units: slice, sizes: tuple[int, ...], most: int) -> Units:
        ids = None if self.ids is None else self.ids[units]
        return replace(self, sizes=one_size(sizes[units]), ids=ids, most=most)

    def groups(self, size: int, each: int) -> Iterator[slice]:
        """Yield the units whose samples are padded to one size, where they are sorted by size.

        ``each`` is the number of elements that are stored for one sample.
        """
        if isinstance(self.sizes, int):
            yield slice(0, self.count(size))
            return
        start, total = 0, 0
        for unit, own in enumerate(self.sizes):
            total += own
            padded = own * (unit + 1 - start)
            if padded > (_MOST_OF_FEW if padded * each < _FEW else _MOST_PADDING) * total:
                yield slice(start, unit)
                start, total = unit, own
        yield slice(start, len(self.sizes))


def one_size(sizes: Sequence[int]) -> int | tuple[int, ...]:
    """Return the number that all sizes are, or else all of them."""
    return sizes[0] if len(set(sizes)) == 1 else tuple(sizes)


@dataclass(frozen=True)
class Order:
    """The order in which samples are computed, so that those of a unit are consecutive, and units sorted by size."""

    samples: Tensor  # the samples in this order, ``[B]``
    places: Tensor  # the place of each sample in it, ``[B]``
    units: Tensor  # the place of each unit in it, ``[U]``, in the order of their first samples in the batch


def units_of(unit: Leaf, size: int, *, keep_ids: bool) -> tuple[Units, Order | None]:
    """Return the units of B samples, and the order that makes them consecutive, or None if they are.

    ``unit`` is the number of samples in each unit, or the id of each sample's unit, ``[B]``. ``keep_ids`` says that a
    reduction returns the ids.
    """
    if is_count(unit):
        if unit < 1 or size % unit:
            fix = "Pass a divisor of the number of samples, or the id of each sample's unit, [B]."
            expected = f"a positive int that divides B = {size}"
            raise ArgumentError.about("unit", expected=expected, received=repr(unit), fix=fix)
        return Units(unit), None
    found, sizes, samples, rank, appearance = _sorted(as_ids(unit, size))
    units = Units(sizes, ids=torch.from_numpy(found) if keep_ids else None)
    if bool((samples == np.arange(size)).all()):
        return units, None
    return units, Order(*(torch.from_numpy(x) for x in (samples, np.argsort(samples), rank[appearance])))


def _sorted(ids: Ids) -> tuple[Ids, int | tuple[int, ...], Ids, Ids, Ids]:
    """Sort units by their sizes, and those of one size by their first samples.

    Returns in this order the ids ``[U]``, the sizes, and the samples ``[B]``; of units in the order of ids their places
    in it; and the units in the order of their first samples.
    """
    found, first, inverse, counts = np.unique(ids, return_index=True, return_inverse=True, return_counts=True)
    appearance = np.argsort(first)
    by_size = appearance[np.argsort(counts[appearance], kind="stable")]
    rank = np.argsort(by_size)
    samples = np.argsort(rank[inverse.reshape(-1)], kind="stable")
    return found[by_size], one_size(counts[by_size].tolist()) if len(ids) else 1, samples, rank, appearance


def consecutive(batch: Tree, unit: Leaf) -> tuple[Tree, int] | None:
    """Return a batch with the samples of a unit beside each other, and their number; None if units differ in size.

    Units stay in the order of their first samples. All tensors of the batch have one row for each sample.
    """
    leaves, structure = trees.flatten(batch)
    sizes = {len(x) for x in leaves if isinstance(x, Tensor) and x.ndim}
    if len(sizes) != 1 or not all(isinstance(x, Tensor) and x.ndim for x in leaves):
        return None
    _, count, samples, *_ = _sorted(as_ids(unit, sizes.pop()))
    if not isinstance(count, int):
        return None
    index = torch.from_numpy(samples).to(leaves[0].device)
    return trees.unflatten([x.index_select(0, index) for x in leaves], structure), count


def is_count(unit: Leaf) -> bool:
    """Return whether units are given by the number of their samples, and not by ids."""
    return type(unit) is int


def has_ids(unit: Leaf) -> bool:
    """Return whether units are given by ids."""
    return unit is not None and not is_count(unit)


def reads_ids(reduction: Reduction) -> bool:
    """Return whether a result depends on more of units than their samples: on ids, or on the order of samples."""
    return reduction.returns_ids or reduction.rows_of_samples


def as_ids(unit: Leaf, size: int) -> Ids:
    """Return the ids of B samples' units as an array; those of a GPU are read once."""
    ids = unit
    if isinstance(unit, Tensor) and not is_batched(unit):
        if not unit.dtype.is_floating_point:  # of a transform's wrapper, NumPy cannot read the memory
            ids = np.asarray(unit.tolist(), dtype=np.int64) if is_wrapped(unit) else unit.cpu().numpy()
    elif not isinstance(unit, Tensor):
        ids = np.asarray(unit) if isinstance(unit, list | tuple | np.ndarray) else unit
    if (
        isinstance(ids, np.ndarray)
        and ids.shape == (size,)
        and (not size or (ids.dtype.kind in "iu" and ids.max() <= np.iinfo(np.int64).max))
    ):
        return ids.astype(np.int64)
    received = f"shape {list(ids.shape)}, {ids.dtype}" if isinstance(ids, np.ndarray | Tensor) else repr(unit)
    fix = "Number what is no integer: ids = numpy.unique(names, return_inverse=True)[1]."
    expected = f"an int, or one integer for each of {size} samples"
    raise ArgumentError.about("unit", expected=expected, received=received, fix=fix)


def weights_of_samples(
    weights: Tensor | None, units: Units, size: int, reduce: UnitReduce
) -> tuple[Tensor | None, Units, Tensor | None]:
    """Return what multiplies each sample's gradient inside its unit, and the weight of each unit.

    Given are the weights of the samples in the order of the units, ``[B]`` float64, or None; a unit's gradient is the
    sum of its samples' gradients, or their mean. Returned are the weights ``[B]``, the units with a scale where all
    samples share it, and ``[U]``: 0 for a unit whose samples all have weight 0, else 1; None for ones.
    """
    if weights is None and reduce == "sum":
        return None, units, None
    if weights is None and isinstance(units.sizes, int):
        return None, replace(units, scale=1 / units.sizes), None
    sizes = torch.tensor(units.of_each(size), dtype=torch.int64, device="cpu")
    if weights is None:
        return (1 / sizes.double()).repeat_interleave(sizes), units, None
    numbers = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)
    counts = torch.zeros(len(sizes), dtype=torch.float64, device="cpu").index_add(0, numbers, (weights != 0).double())
    if reduce == "mean":
        total = torch.zeros_like(counts).index_add(0, numbers, weights)
        if not is_batched(weights) and bool((weights < 0).any()):
            fix = "A unit's mean takes weights >= 0; unit_reduce='sum' takes any."
            received = f"{float(weights.min()):g} among them"
            raise ArgumentError.about("weights", expected="no negative weight", received=received, fix=fix)
        weights = weights / torch.where(counts > 0, total, 1)[numbers]
    return weights, units, (counts > 0).double()
