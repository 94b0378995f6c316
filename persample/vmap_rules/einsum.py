"""Sums of products that are linear layers: ``torch.einsum``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from persample.vmap_rules.batched import is_batched
from persample.vmap_rules.linear import linear


class LinearEinsum(NamedTuple):
    """How an einsum of a matrix and another tensor is a linear layer.

    Args:
        transposed: whether the layer's weight ``[o, i]`` is the transpose of the matrix.
        contracted: the axis of the other tensor that the layer takes for its last, counted from the end.
        made: the axis of the result that is the layer's last, counted from the end.
    """

    transposed: bool
    contracted: int
    made: int


@functools.lru_cache
def linear_einsum(equation: str, place: int) -> LinearEinsum | None:
    """Return how an einsum of two operands is a linear layer, or None if it is none.

    Args:
        equation: the equation.
        place: which operand is the matrix, 0 or 1.

    Examples:
        >>> linear_einsum("oi,ti->to", 0)
        LinearEinsum(transposed=False, contracted=-1, made=-1)
        >>> linear_einsum("...ti, io -> ...ot", 1)
        LinearEinsum(transposed=True, contracted=-1, made=-2)
        >>> linear_einsum("oi,oi->o", 0) is None
        True
    """
    terms, _, result = equation.replace(" ", "").partition("->")
    operands = terms.split(",")
    if len(operands) != 2 or "->" not in equation:
        return None
    matrix, given = operands[place], operands[1 - place]
    contracted, made = set(given) - set(result), set(result) - set(given)
    if len(matrix) != 2 or set(matrix) != contracted | made or not len(contracted) == len(made) == 1:
        return None
    (i,), (o,) = contracted, made
    kept = given.removeprefix("...").replace(i, "")
    if "." in kept + result.removeprefix("..."):  # axes count from the end
        return None
    repeats = given.count(i) > 1 or result.count(o) > 1 or len(set(kept)) < len(kept)
    if repeats or given.replace(i, "") != result.replace(o, ""):  # repeated or moved axes
        return None
    return LinearEinsum(matrix == i + o, given.index(i) - len(given), result.index(o) - len(result))


def _einsum(equation: Any, *operands: Any) -> Tensor:
    """Compute an einsum of a matrix that all samples share as a linear layer, which torch batches as one product."""
    shared = [place for place, x in enumerate(operands) if isinstance(x, Tensor) and x.ndim == 2 and not is_batched(x)]
    for place in shared if isinstance(equation, str) and len(operands) == 2 else ():
        matrix, given = operands[place], operands[1 - place]
        layer = linear_einsum(equation, place)
        if layer is None or not is_batched(given):
            continue
        weight = matrix.T if layer.transposed else matrix
        if given.ndim >= -layer.contracted and given.shape[layer.contracted] == weight.shape[1]:
            return linear(given.movedim(layer.contracted, -1), weight).movedim(-1, layer.made)
    return torch.einsum(equation, *operands)


RULES: dict[Any, Callable[..., Any]] = {torch.einsum: _einsum}
