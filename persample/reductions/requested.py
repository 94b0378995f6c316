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
        keep_factored: whether engines keep factors even for ``materialize``, because ``finish`` writes them straight
            into a previous result.
    """

    reductions: Sequence[Reduction]
    keep_factored: bool = False

    @cached_property
    def required_ops(self) -> frozenset[str]:
        """The operations of ``persample.factors.Factor`` that ``lift`` calls."""
        used = frozenset[str]().union(*(reduction.uses for reduction in self.reductions))
        return used - {"materialize"} if self.keep_factored else used

    def lift(self, gradients: Gradients) -> Any:
        """Return the mergeable leaves of every reduction, and whether the loss depends on any parameter."""
        with full_precision(gradients.losses.device):
            return [reduction.lift(gradients) for reduction in self.reductions], AnyOf(gradients.connected)

    def finish(self, lifted: Sequence[Any], device: torch.device, out: Sequence[Any] | None = None) -> list[Any]:
        """Return the result of every reduction, from its leaves merged over all chunks.

        Args:
            lifted: one tree of merged leaves per reduction.
            device: the device of the parameters.
            out: one previous result per reduction, whose memory may be overwritten.
        """
        targets = [None] * len(self.reductions) if out is None else out
        with full_precision(device):
            triples = zip(self.reductions, lifted, targets, strict=True)
            return [r.finish(x) if to is None else r.finish_into(x, to) for r, x, to in triples]
