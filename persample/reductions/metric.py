"""Norms and inner products in another metric, ‖D⁻¹ᐟ² g‖: D diagonal, one positive number for each element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.factors import Factor
from persample.gradients import Gradients, ParamSpec
from persample.utils.tracing import is_unreadable
from persample.utils.trees import Leaf, Tree, TreeSpec, flatten, leaves_like, on_one_line
from persample.utils.trees import structure as structure_of


class RankOne(NamedTuple):
    """A metric of one parameter that is a product, D = r cᵀ: under it, gradients stay factors.

    Attributes:
        rows: r, positive, ``[o]``, the first axis of the parameter.
        columns: c, positive, ``[*rest]``, all others.
    """

    rows: Tensor
    columns: Tensor


def check_metric(metric: Tree, spec: ParamSpec) -> None:
    """Reject a metric that is no tree like the parameters of positive tensors, or of products of them."""
    if metric is None:
        return
    leaves = leaves_like(metric, spec.structure)
    if leaves is None:
        raise _rejected("metric", f"the structure {on_one_line(spec.structure)}", on_one_line(structure_of(metric)))
    for path, shape, leaf in zip(spec.paths, spec.shapes, leaves, strict=True):
        name = path.replace("params", "metric", 1)
        parts: tuple[Leaf, ...] = leaf if isinstance(leaf, RankOne) else (leaf,)
        expected = f"a positive real tensor that broadcasts to {list(shape)}, or RankOne(rows, columns)"
        for part, wanted in zip(parts, _shapes(leaf, shape), strict=True):
            if not isinstance(part, Tensor) or part.is_complex() or not _broadcasts(part.shape, wanted):
                received = (
                    f"shape {list(part.shape)}, {part.dtype}" if isinstance(part, Tensor) else type(part).__name__
                )
                raise _rejected(name, expected, received)
            if not is_unreadable(part) and part.numel() and not bool((part > 0).all()):
                raise _rejected(name, expected, f"{float(part.min()):g} among its numbers")


def _rejected(name: str, expected: str, received: str) -> ArgumentError:
    fix = "Pass for example Adam's second moments, plus a small number."
    return ArgumentError.about(name, expected=expected, received=received, fix=fix)


def _shapes(leaf: Leaf, shape: torch.Size) -> list[torch.Size]:
    return [shape[:1], shape[1:]] if isinstance(leaf, RankOne) else [shape]


def _broadcasts(shape: torch.Size, wanted: torch.Size) -> bool:
    return len(shape) <= len(wanted) and all(
        size in (1, other) for size, other in zip(reversed(shape), reversed(wanted), strict=False)
    )


def in_metric(gradients: Gradients, metric: Tree) -> Gradients:
    """Return the gradients D⁻¹ᐟ² gᵢ, or the gᵢ where the metric is None."""
    if metric is None:
        return gradients
    spec = gradients.spec
    scaled = tuple(scaled_by_metric(gradients.factors, metric, spec.structure, spec.dtypes))
    return Gradients(scaled, spec, gradients.losses, weights=gradients.weights)


def scaled_by_metric(
    factors: Sequence[Factor], metric: Tree, structure: TreeSpec, dtypes: Sequence[torch.dtype]
) -> list[Factor]:
    """Return the factors of D⁻¹ᐟ² gᵢ of each parameter."""
    if metric is None:
        return list(factors)
    leaves = leaves_like(metric, structure) or []
    return list(map(_scaled, factors, leaves, dtypes))


def _scaled(factor: Factor, metric: Leaf, dtype: torch.dtype) -> Factor:
    """Return the factor of D⁻¹ᐟ² gᵢ, which stays one of products where D = r cᵀ, also of one row or column."""
    shape = torch.Size(factor.shape[len(factor.outputs) :])
    shape = shape[:-1] if dtype.is_complex else shape
    pair = metric if isinstance(metric, RankOne) else _as_pair(metric, len(shape))

    def roots(x: Tensor, wanted: torch.Size) -> Tensor:
        return x.to(device=factor.device, dtype=torch.float64).rsqrt().expand(wanted)

    if pair is None:
        whole = roots(metric, shape)
        return factor.times_elements(whole.unsqueeze(-1).expand(*shape, 2) if dtype.is_complex else whole)
    rows, columns = map(roots, pair, _shapes(pair, shape))
    return factor.times_rank_one(rows, columns.unsqueeze(-1).expand(*shape[1:], 2) if dtype.is_complex else columns)


def _as_pair(metric: Tensor, axes: int) -> RankOne | None:
    """Return rows and columns whose product is the metric, as its shape shows; None if it does not."""
    whole = metric[(None,) * (axes - metric.ndim)]
    if axes < 2:
        return None
    if whole.shape[1:].numel() == 1:
        return RankOne(whole.flatten(), whole.new_ones(()))
    return RankOne(whole.new_ones(()), whole[0]) if len(whole) == 1 else None


def largest_root(metric: Tree) -> float:
    """Return √(max D), of all parameters; 1 without a metric."""
    leaves, _ = flatten(metric, is_leaf=lambda x: isinstance(x, RankOne))
    parts = [leaf if isinstance(leaf, RankOne) else (leaf,) for leaf in leaves if leaf is not None]
    largest = [math.prod(float(x.max()) for x in part) for part in parts if all(x.numel() for x in part)]
    return math.sqrt(max(largest, default=1.0))
