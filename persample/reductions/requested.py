"""What engines do with the gradients of a chunk: hand them to every reduction that was asked for."""

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
        keep_factored: keep products of signals and inputs as such until the last, even where they are asked for whole.
    """

    reductions: Sequence[Reduction]
    keep_factored: bool = False

    @cached_property
    def required_ops(self) -> frozenset[str]:
        """The operations of ``persample.factors.Factor`` that the reductions call."""
        return frozenset().union(*(reduction.uses for reduction in self.reductions))

    def __call__(self, gradients: Gradients) -> Any:
        """Return the mergeable leaves of every reduction, and whether the loss depends on any parameter."""
        with full_precision(gradients.losses.device):
            return [reduction.lift(gradients) for reduction in self.reductions], AnyOf(gradients.connected)

    def finish(self, lifted: Sequence[Any], device: torch.device, out: Sequence[Any] | None = None) -> list[Any]:
        """Return the result of every reduction, from its leaves merged over all chunks.

        Args:
            lifted: one tree of merged leaves per reduction.
            device: where the parameters are.
            out: one previous result per reduction, whose memory may be written.
        """
        targets = [None] * len(self.reductions) if out is None else out
        with full_precision(device):
            triples = zip(self.reductions, lifted, targets, strict=True)
            return [r.finish(x) if to is None else r.finish_into(x, to) for r, x, to in triples]
