"""Several processes as one: z is gathered, gradients are added up, and an error of one process is raised on all."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from persample.errors import ArgumentError, LossError
from persample.merge import Summed, merge
from persample.utils import trees

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """The processes of a group, or this one alone.

    Args:
        group: a process group; None for this process alone.
        device: the device of this process's tensors.
    """

    group: Any = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (it is immutable)

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def gather_objects(self, own: Any) -> list[Any]:
        """Return the objects of all processes, by rank."""
        if self.group is None:
            return [own]
        objects = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(objects, own, group=self.group)
        return objects

    def together(self, step: Callable[[], T]) -> T:
        """Run a step on every process; an error of one process is raised on all, so that no process waits for it.

        Args:
            step: a function without communication.

        Returns:
            The result of this process.

        Raises:
            LossError: if the step failed on another process; an error of this process is raised unchanged.
        """
        if self.group is None:
            return step()
        try:
            result = step()
        except Exception as error:
            self.gather_objects(f"{type(error).__name__}: {error}")
            raise
        failed = {rank: text for rank, text in enumerate(self.gather_objects(None)) if text is not None}
        if failed:
            raise LossError(f"composite_grads failed on other processes of the group, by rank: {failed}.")
        return result

    def gather_rows(self, z: Any, sizes: Sequence[int]) -> Any:
        """Return the rows of all processes, in the order of their ranks.

        Args:
            z: the rows of this process, a tree of tensors ``[n, ...]``.
            sizes: the n of every process.

        Raises:
            LossError: if z of the processes differ in structure, shape or dtype.
        """
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

    def merged(self, leaves: Any) -> Any:
        """Return a tree of mergeable leaves, of the same structure on every process, merged over all processes."""
        if self.group is None:
            return leaves
        return trees.tree_map(self._merged_leaf, leaves)

    def _merged_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Summed):  # may be large: only the sum is communicated
            value = leaf.value.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(value, group=self.group)
            return replace(leaf, value=value)
        parts = [self._unpacked(part) for part in self.gather_objects(_packed(leaf))]
        return functools.reduce(merge, parts)

    def _unpacked(self, data: bytes) -> Any:
        # Trusted: the other processes of the group run the same program.
        return torch.load(io.BytesIO(data), map_location=self.device, weights_only=False)


def _packed(leaf: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(leaf, buffer)
    return buffer.getvalue()


def check_group(group: Any) -> None:
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
    """Return the rows that belong to one process, from those of all processes by rank; None stays None.

    Examples:
        >>> own_rows([torch.tensor([1, 2, 3]), None], [1, 2], 1)
        [tensor([2, 3]), None]
    """
    start = sum(sizes[:rank])
    return [None if x is None else x[start : start + sizes[rank]] for x in tensors]
