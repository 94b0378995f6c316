"""The reductions of one call, all computed in one pass over the gradients."""

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
        keep_factored: whether engines keep factors even for reductions that return the gradients written out.
        keep_stacked: whether ``finish`` leaves rows as ``Stacked``, which ``outputs.write_into`` writes straight into
            a previous result.
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
            device: the device of the parameters.
        """
        with full_precision(device):
            pairs = zip(self.reductions, lifted, strict=True)
            return [x if self.keep_stacked and r.returns_rows else r.finish(x) for r, x in pairs]
