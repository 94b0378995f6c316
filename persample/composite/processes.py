"""Several processes as one: what each found is gathered, gradients are added up, an error on one is an error on all."""

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
        device: where the tensors of this process are.
    """

    group: Any = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (it is immutable)

    @property
    def rank(self) -> int:
        """The place of this process in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def facts(self, fact: Any) -> list[Any]:
        """Return what every process passes, by rank."""
        if self.group is None:
            return [fact]
        facts = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(facts, fact, group=self.group)
        return facts

    def together(self, step: Callable[[], T]) -> T:
        """Run a step; where it fails on one process it fails on all, instead of leaving the others waiting.

        Args:
            step: what is done on every process.

        Returns:
            What it returns.

        Raises:
            LossError: if it failed on another process; an error of this one is raised as it is.
        """
        if self.group is None:
            return step()
        try:
            result, error = step(), None
        except Exception as raised:  # noqa: BLE001 (raised again below)
            result, error = None, raised
        errors = self.facts(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = {rank: text for rank, text in enumerate(errors) if text is not None}
        if failed:
            raise LossError(f"composite_grads failed on other processes of the group, by rank: {failed}.")
        return result  # type: ignore[return-value]

    def gathered(self, z: Any) -> Any:
        """Return the rows of all processes, in the order of their ranks.

        Args:
            z: the rows of this one, a tree of tensors ``[n, ...]``; n may differ.

        Raises:
            LossError: if the processes' z are of different structures, shapes or dtypes.
        """
        if self.group is None:
            return z
        leaves, structure = trees.flatten(z)
        kinds = self.facts((str(structure), [(x.shape[1:], x.dtype) for x in leaves]))
        if any(kind != kinds[0] for kind in kinds):
            listed = "; ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
            raise LossError(f"encode_fn: expected z of one structure, shape and dtype on all ranks, received {listed}.")
        return trees.tree_map(self._gathered_rows, z)

    def _gathered_rows(self, x: Tensor) -> Tensor:
        sizes = self.facts(len(x))
        width = x.shape[1:].numel() * x.element_size()
        rows = x.contiguous().view(-1).view(torch.uint8).view(len(x), width)  # bytes: every backend knows them
        padded = F.pad(rows, (0, 0, 0, max(sizes) - len(x)))
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.group)
        everything = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return everything.view(-1).view(x.dtype).view(sum(sizes), *x.shape[1:])

    def merged(self, leaves: Any) -> Any:
        """Return a tree of mergeable leaves, merged over all processes.

        Args:
            leaves: of this process; of the same structure on every one.
        """
        if self.group is None:
            return leaves
        return trees.tree_map(self._merged_leaf, leaves)

    def _merged_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Summed):  # the large ones: not every process's, only their sum
            value = leaf.value.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(value, group=self.group)
            return replace(leaf, value=value)
        parts = [self._unpacked(part) for part in self.facts(_packed(leaf))]
        return functools.reduce(merge, parts)

    def _unpacked(self, data: bytes) -> Any:
        # What the other processes of one's own group computed a moment ago.
        return torch.load(io.BytesIO(data), map_location=self.device, weights_only=False)


def _packed(leaf: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(leaf, buffer)
    return buffer.getvalue()


def check_group(group: Any) -> None:
    """Refuse what is no process group that this process belongs to.

    Args:
        group: what the user passed.

    Raises:
        ArgumentError: if it is none.
    """
    if group is None:
        return
    fix = "Call torch.distributed.init_process_group first, and pass torch.distributed.group.WORLD for all processes."
    if not (dist.is_available() and dist.is_initialized()):
        received = f"{type(group).__name__} without initialized processes"
        raise ArgumentError.about("group", expected="a process group or None", received=received, fix=fix)
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        received = "a group without this process" if group == dist.GroupMember.NON_GROUP_MEMBER else repr(group)
        raise ArgumentError.about("group", expected="a process group or None", received=received, fix=fix)


def own_rows(rows: Tensor, sizes: Sequence[int], rank: int) -> Tensor:
    """Return the rows that belong to one process.

    Args:
        rows: of all processes, by rank.
        sizes: how many belong to each.
        rank: which process.

    Examples:
        >>> own_rows(torch.tensor([1, 2, 3]), [1, 2], 1)
        tensor([2, 3])
    """
    start = sum(sizes[:rank])
    return rows[start : start + sizes[rank]]
