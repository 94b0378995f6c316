"""Which index tensors number the rows of all samples' tables, known by where they come from, not by their values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


class Numbering:
    """Follows ``arange(S)·V`` through views to ``index + arange(S)·V``, with which vmap looks up S tables as one."""

    def __init__(self) -> None:
        # By identity: the tensor (so that its id is not used again), S, V, and whether an index was added.
        self._known: dict[int, tuple[Tensor, int, int, bool]] = {}

    def samples(self, x: Tensor, *, index: bool) -> tuple[int, int]:
        """Return S and V, the samples along the first axis, or zeros if nothing is known.

        Args:
            x: a tensor of integers.
            index: whether an index must have been added, or must not.
        """
        _, samples, step, added = self._known.get(id(x), (x, 0, 0, index))
        return (samples, step) if added == index else (0, 0)

    def arange(self, *bounds: int, **kwargs: Any) -> Tensor:
        """Call ``arange`` and remember a numbering that starts at 0.

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
        """Call an operation of known tensors, and remember a result that still has the samples along its first axis.

        Args:
            func: view, unsqueeze, expand or add.
            *args: its arguments.
            **kwargs: as in torch.

        Returns:
            The result, or None if nothing is known of the arguments.
        """
        if not self._known:
            return None
        known = [self._known[id(x)] for x in args if id(x) in self._known]
        if len(known) != 1:
            return None
        (x, samples, step, added), out = known[0], func(*args, **kwargs)
        first = x.shape[:1] == out.shape[:1] == (samples,)
        if func is aten.add.Tensor:
            alone = x.ndim == out.ndim and x.numel() == samples and not added and not kwargs
            if first and alone:
                self._known[id(out)] = (out, samples, step, True)
        elif first and (func is not aten.expand.default or out.ndim == x.ndim):
            self._known[id(out)] = (out, samples, step, added)
        return out

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()
