"""Partial results of several processes merged: one collective per dtype for sums, one for all that is not a sum."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass, replace
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from persample.errors import LossError
from persample.factors import Factor
from persample.merge import Moments, Summed, merge
from persample.processes.group import Processes
from persample.utils import trees
from persample.utils.digest import name_of


def merged(partial: Any, processes: Processes) -> Any:
    """Return a tree of mergeable leaves, of the same structure on every process, merged over all processes.

    Sums are all-reduced, all of one dtype at once. So are moments, by Chan's formula for many parts at once: the
    mean first, then the deviations from it. Everything else is gathered, and merged in the order of the ranks.

    Args:
        partial: the tree of this process.
        processes: the processes.

    Returns:
        The tree for the samples of all processes, the same on all.
    """
    if processes.group is None:
        return partial
    leaves, structure = trees.flatten(partial)
    summed = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Summed)]
    moments = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Moments)]
    others = [place for place in range(len(leaves)) if place not in {*summed, *moments}]
    first = [leaves[place].value for place in summed]
    for place in moments:
        first += [leaves[place].n, leaves[place].n * leaves[place].mean]
    totals = iter(_all_reduced(first, processes))
    for place in summed:
        leaves[place] = replace(leaves[place], value=next(totals))
    centered = [leaves[place].around(next(totals), next(totals)) for place in moments]
    deviations = _all_reduced([leaf.m2 for leaf in centered], processes)
    for place, leaf, m2 in zip(moments, centered, deviations, strict=True):
        leaves[place] = replace(leaf, m2=m2)
    for place, leaf in zip(others, _gathered([leaves[place] for place in others], processes), strict=True):
        leaves[place] = leaf
    return trees.unflatten(leaves, structure)


def _all_reduced(tensors: Sequence[Tensor], processes: Processes) -> list[Tensor]:
    """Return the sums over all processes, with one collective for all tensors of one dtype."""
    totals: list[Tensor] = list(tensors)
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        places = [place for place, x in enumerate(tensors) if x.dtype == dtype]
        flat = torch.cat([tensors[place].reshape(-1) for place in places])
        dist.all_reduce(flat, group=processes.group)
        for place, part in zip(places, flat.split([tensors[place].numel() for place in places]), strict=True):
            totals[place] = part.clone().view(tensors[place].shape)
    return totals


def one_by_one(own: Any, processes: Processes) -> Iterator[Any]:
    """Iterate over the trees of all processes, of which each holds one beside its own at a time.

    Args:
        own: the tree of this process, of the same structure on every process.
        processes: the processes.

    Yields:
        The trees, by rank.
    """
    leaves, structure = trees.flatten(own)
    for rank in range(processes.size):
        packed = [_packed(leaves) if rank == processes.rank else None]
        dist.broadcast_object_list(packed, group=processes.group, group_src=rank)
        yield own if rank == processes.rank else trees.unflatten(_unpacked(packed[0], leaves, processes), structure)


def _gathered(leaves: list[Any], processes: Processes) -> list[Any]:
    if not leaves:
        return []
    gathered = processes.gather_objects(_packed(leaves))
    return functools.reduce(merge, [_unpacked(data, leaves, processes) for data in gathered])


def _packed(leaves: list[Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(_plain(leaves), buffer)
    return buffer.getvalue()


def _plain(x: Any) -> Any:
    """Return tensors, numbers and names for a leaf: of its class the name, of its fields the same."""
    if is_dataclass(x):
        return {"class": name_of(type(x)), **{name: _plain(getattr(x, name)) for name in x.__dataclass_fields__}}
    return type(x)(map(_plain, x)) if type(x) in {list, tuple} else x


def _unpacked(data: Any, own: list[Any], processes: Processes) -> Any:
    """Return the leaves of another process: those of the classes of our own leaves, and of factors, and of no other."""
    known = {name_of(kind): kind for kind in (*map(type, own), *_subclasses(Factor))}

    def restored(x: Any) -> Any:
        if isinstance(x, dict):
            return known[x.pop("class")](**{name: restored(value) for name, value in x.items()})
        return type(x)(map(restored, x)) if type(x) in {list, tuple} else x

    try:
        return restored(torch.load(io.BytesIO(data), map_location=processes.device, weights_only=True))
    except (UnpicklingError, KeyError) as error:
        expected, received = "results of tensors and of classes known here from the other processes", repr(error)[:99]
        raise LossError(
            f"{processes.called}: expected {expected}, received {received}. Run the same program."
        ) from error


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)
