"""The reductions of one call, applied together: all of them are answered from one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from persample.gradients import Gradients
from persample.merge import AnyOf
from persample.reductions import Reduction
from persample.utils.dtypes import full_precision


@dataclass(frozen=True)
class Reductions:
    """The reductions of one call.

    Args:
        reductions: the reductions.
        keep_factored: do not write gradients out before ``finish``, also for reductions that return them.
        keep_stacked: ``finish`` leaves rows that a previous result can take directly as ``Stacked``: see
            ``outputs.write_into``.
    """

    reductions: Sequence[Reduction]
    keep_factored: bool = False
    keep_stacked: bool = False

    @cached_property
    def required_ops(self) -> frozenset[str]:
        """The operations of ``persample.factors.Factor`` that ``lift`` calls."""
        used = frozenset[str]().union(*(reduction.uses for reduction in self.reductions))
        return used - {"materialize"} if self.keep_factored else used

    def lift(self, gradients: Gradients) -> Any:
        """Return the mergeable leaves of every reduction, and whether the loss depends on any parameter."""
        with full_precision(gradients.losses.device):
            return [reduction.lift(gradients) for reduction in self.reductions], AnyOf(gradients.connected)

    def finish(self, lifted: Sequence[Any], device: torch.device) -> list[Any]:
        """Return the result of every reduction, from its leaves merged over all chunks.

        Args:
            lifted: one tree of merged leaves per reduction.
            device: where the parameters are.
        """
        with full_precision(device):
            pairs = zip(self.reductions, lifted, strict=True)
            return [x if self.keep_stacked and r.returns_rows else r.finish(x) for r, x in pairs]
