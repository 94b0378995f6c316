"""Several processes of ``torch.distributed`` as one: an error of one is raised on all, partial results are merged.

There is one collective per dtype for sums, and one for all that is not a sum.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from persample.errors import ArgumentError, LossError
from persample.factors import Factor
from persample.merge import Moments, Summed, merge
from persample.utils import trees
from persample.utils.trees import Leaf, Tree, name_of

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """The processes of a group, or this one alone.

    Args:
        group: a process group; None for this process alone.
        device: the device of this process's tensors.
        called: the public function that communicates, for messages.
    """

    group: Any = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (it is immutable)
    called: str = "composite_grads"

    @property
    def size(self) -> int:
        """The number of processes."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Explain the error of a collective that another process does not answer."""
        try:
            yield
        except LossError:
            raise
        except RuntimeError as error:
            raise LossError(
                f"{self.called}: another process of the group has ended, or did not answer within the group's timeout; "
                f"its own error says why. torch said: {error}"
            ) from error

    def gather_objects(self, own: object) -> list[Leaf]:
        """Return the objects of all processes, by rank."""
        if self.group is None:
            return [own]
        objects = [None] * self.size
        dist.all_gather_object(objects, own, group=self.group)
        return objects

    def together(self, step: Callable[[], T], alike: Callable[[T], dict[str, str]] | None = None) -> T:
        """Run a step on every process; an error of one process is raised on all, so that no process waits for it.

        Args:
            step: a function without communication.
            alike: returns the arguments of the call that must be the same on all processes, in words, by name, from
                the result of the step.

        Returns:
            The result of this process.

        Raises:
            LossError: if the step failed on another process; an error of this process is raised unchanged.
            ArgumentError: if an argument differs.
        """
        if self.group is None:
            return step()
        try:
            result = step()
            arguments = alike(result) if alike else {}
        except Exception as error:
            self.raise_failures(f"{type(error).__name__}: {error}")
            raise
        self.raise_failures(None, arguments)
        return result

    def raise_failures(self, own: str | None, arguments: Mapping[str, str] | None = None) -> None:
        """Raise an error if a process has failed, or has other arguments; all processes call this at once."""
        texts, known = zip(*self.gather_objects((own, arguments)), strict=True)
        failed = {rank: text for rank, text in enumerate(texts) if text is not None}
        if failed and own is None:
            raise LossError(f"{self.called} failed on other processes of the group, by rank: {failed}.")
        for name in () if failed else {name: None for one in known for name in one or ()}:
            if len({one.get(name) for one in known}) > 1:
                listed = "; ".join(f"rank {rank}: {one.get(name)}" for rank, one in enumerate(known))
                fix = "Results are those of all processes: pass the same on each."
                raise ArgumentError.about(name, expected="the same on all ranks", received=listed, fix=fix)

    def gather_rows(self, z: object, sizes: Sequence[int]) -> Tree:
        """Return the rows of all processes, in the order of their ranks."""
        if self.group is None:
            return z
        leaves, structure = trees.flatten(z)
        formats = self.gather_objects((str(structure), [(x.shape[1:], x.dtype) for x in leaves]))
        if any(one != formats[0] for one in formats):
            listed = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(formats))
            raise LossError(f"encode_fn: expected z of one structure, shape and dtype on all ranks, received {listed}.")
        return trees.tree_map(lambda x: self._gather_leaf(x, sizes), z)

    def _gather_leaf(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        width = x.shape[1:].numel() * x.element_size()
        rows = x.contiguous().view(-1).view(torch.uint8).view(len(x), width)  # every backend supports bytes
        padded = F.pad(rows, (0, 0, 0, max(sizes) - len(x)))
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.group)
        everything = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return everything.view(-1).view(x.dtype).view(sum(sizes), *x.shape[1:])


def check_group(group: object) -> None:
    """Reject anything but a process group that this process belongs to, or None."""
    initialized = dist.is_available() and dist.is_initialized()
    if group is None or (initialized and isinstance(group, dist.ProcessGroup)):
        return
    received = repr(group) if initialized else f"{type(group).__name__} without initialized processes"
    if initialized and group == dist.GroupMember.NON_GROUP_MEMBER:
        received = "a group without this process"
    fix = "Call torch.distributed.init_process_group first, and pass torch.distributed.group.WORLD for all processes."
    raise ArgumentError.about("group", expected="a process group or None", received=received, fix=fix)


def own_rows(tensors: Sequence[Tensor | None], sizes: Sequence[int], rank: int) -> list[Tensor | None]:
    """Return the rows that belong to one process, from those of all processes by rank; None stays None."""
    start = sum(sizes[:rank])
    return [None if x is None else x[start : start + sizes[rank]] for x in tensors]


def merged(partial: object, processes: Processes) -> Tree:
    """Return a tree of mergeable leaves, of the same structure on every process, merged over all processes.

    Sums are all-reduced, all of one dtype at once. So are moments, by Chan's formula for many parts at once: the
    mean first, then the deviations from it. Everything else is gathered, and merged in the order of the ranks.
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


def one_by_one(own: object, processes: Processes) -> Iterator[Leaf]:
    """Iterate over the trees of all processes; each process stores one beside its own at a time."""
    leaves, structure = trees.flatten(own)
    for rank in range(processes.size):
        packed = [_packed(leaves) if rank == processes.rank else None]
        dist.broadcast_object_list(packed, group=processes.group, group_src=rank)
        yield own if rank == processes.rank else trees.unflatten(_unpacked(packed[0], leaves, processes), structure)


def _gathered(leaves: list[Leaf], processes: Processes) -> list[Leaf]:
    if not leaves:
        return []
    gathered = processes.gather_objects(_packed(leaves))
    return functools.reduce(merge, [_unpacked(data, leaves, processes) for data in gathered])


def _packed(leaves: list[Leaf]) -> bytes:
    buffer = io.BytesIO()
    torch.save(_plain(leaves), buffer)
    return buffer.getvalue()


def _plain(x: Tree) -> Tree:
    """Return a leaf as the name of its class and its fields: tensors, numbers and names only."""
    if is_dataclass(x):
        return {"class": name_of(type(x)), **{name: _plain(getattr(x, name)) for name in x.__dataclass_fields__}}
    return type(x)(map(_plain, x)) if type(x) in {list, tuple} else x


def _unpacked(data: Tree, own: list[Leaf], processes: Processes) -> Tree:
    """Return the leaves of another process: those of the classes of our own leaves, and of factors, and of no other."""
    known = {name_of(kind): kind for kind in (*map(type, own), *_subclasses(Factor))}

    def restored(x: Tree) -> Tree:
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


def _subclasses(kind: type) -> Iterator[type[Tree]]:
    subclasses: list[type[Tree]] = kind.__subclasses__()
    for one in subclasses:
        yield one
        yield from _subclasses(one)
