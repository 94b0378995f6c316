"""The reductions of one call, all computed in one pass over the gradients; and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from persample.factors import Factor
from persample.gradients import Gradients
from persample.merge import AnyOf
from persample.reductions.base import Reduction
from persample.utils import trees
from persample.utils.digest import digest, name_of
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


def described(reductions: Sequence[Reduction], container: trees.TreeSpec) -> str:
    """Return the reductions of a call in words.

    Args:
        reductions: the reductions.
        container: the structure of their container.

    Examples:
        >>> from persample import Norm, Sum
        >>> described([Sum(), Norm()], trees.structure((1, 2)))
        "('Sum()', 'Norm(per_param=False)')"
    """
    return str(trees.unflatten(list(map(in_words, reductions)), container))


def in_words(reduction: Reduction) -> str:
    """Return the class and options of a reduction; functions are told by their names alone.

    Examples:
        >>> from persample import ClippedMean
        >>> in_words(ClippedMean(1.0))
        'ClippedMean(max_norm=1.0, per_param=False)'
    """
    given: dict[str, Any] = (
        {one.name: getattr(reduction, one.name) for one in fields(reduction)} if is_dataclass(reduction) else {}
    )
    listed = (f"{name}={_value(value)}" for name, value in given.items())
    return f"{type(reduction).__name__}({', '.join(listed)})"


def _value(value: Any) -> str:
    if callable(value) and not isinstance(value, nn.Module):
        return name_of(value)
    if value is None or isinstance(value, int | float | str):
        return repr(value)
    return digest(trees.tree_map(lambda leaf: leaf.tensors if isinstance(leaf, Factor) else leaf, value))
