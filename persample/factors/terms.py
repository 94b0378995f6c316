"""Norms of sums of products Σₜ lₜ rₜᵀ, from the inner products of their terms."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from persample.factors import cost_model
from persample.utils.norms import memory_of_rows

Pair = tuple[Tensor, Tensor]


def squared_norms_of_sums(pairs: Sequence[Pair]) -> list[Tensor]:
    """Return ‖Σₜ lₜ rₜᵀ‖² = Σₜᵤ ⟨lₜ, lᵤ⟩ ⟨rₜ, rᵤ⟩ of each pair, summed over groups, ``[B]`` float64.

    Inner products of operands that pairs share, as layers with one input do, are computed once.

    Args:
        pairs: signals ``[B, G, T, o]`` and inputs ``[B, G, T, i]``.

    Examples:
        >>> l, r = torch.tensor([[[[1.0], [2.0]]]]), torch.tensor([[[[3.0], [4.0]]]])
        >>> squared_norms_of_sums([(l, r), (l, l)])  # 3 + 8 and 1 + 4, squared
        [tensor([121.], dtype=torch.float64), tensor([25.], dtype=torch.float64)]
    """
    found: dict[int, Tensor] = {}
    keys = [tuple(map(memory_of_rows, pair)) for pair in pairs]
    for places in _connected(keys):
        found |= zip(places, _of_connected([pairs[k] for k in places], [keys[k] for k in places]), strict=True)
    return [found[place] for place in range(len(pairs))]


def _connected(keys: Sequence[tuple[Any, Any]]) -> list[list[int]]:
    """Return the places of pairs that share operands, directly or by others."""
    groups: list[tuple[set[Any], list[int]]] = []
    for place, pair in enumerate(keys):
        known, places = set(pair), [place]
        for group in [group for group in groups if not known.isdisjoint(group[0])]:
            groups.remove(group)
            known, places = known | group[0], group[1] + places
        groups.append((known, places))
    return [places for _, places in groups]


def _of_connected(pairs: Sequence[Pair], keys: Sequence[tuple[Any, Any]]) -> list[Tensor]:
    """Return the squared norms of pairs, from a few samples at a time, whose copies in float64 stay in the cache."""
    operands = {key: x for pair, of_pair in zip(pairs, keys, strict=True) for key, x in zip(of_pair, pair, strict=True)}
    first = pairs[0][0]
    step = cost_model.rows_in_cache(len(first), sum(prod(x.shape[1:]) for x in operands.values()), first.device)
    blocks: list[list[Tensor]] = []
    for start in range(0, max(len(first), 1), step):
        products = {key: _inner_products(x[start : start + step]) for key, x in operands.items()}
        # The T² terms cancel: float32 would lose per cents.
        blocks.append([(products[left] * products[right]).sum((1, 2, 3)).clamp_min(0) for left, right in keys])
    return [torch.cat(of_pair) if len(blocks) > 1 else of_pair[0] for of_pair in zip(*blocks, strict=True)]


def _inner_products(x: Tensor) -> Tensor:
    wide = x.double()
    return wide @ wide.mT
