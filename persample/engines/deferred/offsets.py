"""The index tensors with which vmap looks up the tables of all samples as one table, known by their origin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


class SampleOffsets:
    """Follows ``arange(S)·V`` through views to ``index + arange(S)·V``: the numbers of rows in S tables of V rows."""

    def __init__(self) -> None:
        # By id: the tensor (kept alive, so that its id stays its own), S, V, and whether an index was added.
        self._known: dict[int, tuple[Tensor, int, int, bool]] = {}

    def sizes(self, x: Tensor, *, index_added: bool) -> tuple[int, int]:
        """Return S and V of a known tensor, zeros of any other.

        Args:
            x: a tensor of integers.
            index_added: whether an index must have been added, or must not.
        """
        _, samples, step, added = self._known.get(id(x), (x, 0, 0, index_added))
        return (samples, step) if added == index_added else (0, 0)

    def arange(self, *bounds: int, **kwargs: Any) -> Tensor:
        """Call ``arange``, and remember a result that starts at 0.

        Args:
            *bounds: end; start and end; or start, end and step.
            **kwargs: as in torch.
        """
        start, end, step = (*bounds, 1) if len(bounds) == 2 else (0, *bounds, 1) if len(bounds) == 1 else bounds
        out = aten.arange.start_step(start, end, step, **kwargs)
        if start == 0:
            self._known[id(out)] = (out, len(out), step, False)
        return out

    def follow(self, func: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        """Call an operation of known tensors, and remember a result whose first axis still counts the samples.

        Args:
            func: view, unsqueeze, expand or add.
            *args: its arguments.
            **kwargs: as in torch.

        Returns:
            The result, or None if no argument is known.
        """
        if not self._known:
            return None
        known = [self._known[id(x)] for x in args if id(x) in self._known]
        if len(known) != 1:
            return None
        (x, samples, step, added), out = known[0], func(*args, **kwargs)
        counts_samples = x.shape[:1] == out.shape[:1] == (samples,)
        if func is aten.add.Tensor:
            only_offsets = x.ndim == out.ndim and x.numel() == samples and not added and not kwargs
            if counts_samples and only_offsets:
                self._known[id(out)] = (out, samples, step, True)
        elif counts_samples and (func is not aten.expand.default or out.ndim == x.ndim):
            self._known[id(out)] = (out, samples, step, added)
        return out
