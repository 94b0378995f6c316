"""Several processes go through their batches side by side, so that an error on one of them ends all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from persample.processes import Processes

T = TypeVar("T")


class Lockstep:
    """One all-reduce of two numbers for each batch: how many processes go on, and how many failed.

    It runs while the batch is computed, and is awaited before the next one. So a process learns of an error elsewhere
    after one more batch, and processes without batches left wait for the others.

    Args:
        processes: the processes.
    """

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self._round: tuple[torch.Tensor, Any] | None = None
        self._is_over = False

    def through(self, items: Iterable[T]) -> Iterator[T]:
        """Iterate over the items of this process, and wait until all processes are through theirs.

        Args:
            items: the items.

        Yields:
            The items. An error in the consumer must be passed to ``fail``.

        Raises:
            LossError: if another process failed.
        """
        if self.processes.group is None:
            yield from items
            return
        source, has_more = iter(items), True
        while True:
            item = next(source, self)
            has_more = item is not self
            going, failed = self._await()
            if failed:
                self._is_over = True
                self.processes.raise_failures(None)
            if not going:
                return
            self._begin(going=has_more, failed=False)
            if item is not self:
                yield item  # type: ignore[misc]  # the sentinel is this object

    def fail(self, error: Exception) -> None:
        """Tell the other processes of an error of this one.

        Args:
            error: the error.
        """
        if self.processes.group is None or self._is_over:
            return
        _, failed = self._await()
        if not failed:
            self._begin(going=False, failed=True)
            self._await()
        self.processes.raise_failures(f"{type(error).__name__}: {error}")

    def _begin(self, *, going: bool, failed: bool) -> None:
        state = torch.tensor([going, failed], dtype=torch.int32, device=self.processes.device)
        self._round = state, dist.all_reduce(state, group=self.processes.group, async_op=True)

    def _await(self) -> tuple[int, int]:
        if self._round is None:
            return 1, 0
        state, work = self._round
        self._round, self._is_over = None, True
        with self.processes.answered():
            work.wait()
        self._is_over = False
        going, failed = state.tolist()
        return going, failed
