"""Contractions of gradients written out, ``[B, *shape]``, the defaults of all factors; norms of sums of products.

The T² terms of ‖Σₜ lₜ rₜᵀ‖² = Σₜᵤ ⟨lₜ, lᵤ⟩ ⟨rₜ, rᵤ⟩ may cancel. On CPUs they are computed in float32, and once more in
float64 for the samples where they do, or where float32 cannot hold them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from persample._torch import cond
from persample.factors import cost_model
from persample.utils.numerics import accumulate_dtype, memory_of_rows
from persample.utils.tracing import Opaque, are_plain, is_for_compiler, is_recorded
from persample.utils.trees import Leaf, Tree

# For so few columns MKL takes up to 5 times as long as for as many rows (torch 2.13, AMD EPYC); for the second number
# up to 3 times as long, if the sums have many terms (Intel Xeon).
_FEW_COLUMNS, _FEW_COLUMNS_OF_MANY_TERMS, _MANY_TERMS = 8, 24, 256
# Blocks of what is converted to another dtype: it is read once, and takes memory of its own.
_CONVERTED = 1 / 4


def sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left.mT @ right``, ``[..., o, i]`` from ``[..., T, o]`` and ``[..., T, i]``."""
    multiply = torch.mm if left.ndim == 2 else torch.matmul
    few = _FEW_COLUMNS_OF_MANY_TERMS if left.shape[-2] >= _MANY_TERMS else _FEW_COLUMNS
    if left.device.type == "cpu" and right.shape[-1] <= few < left.shape[-1]:
        return multiply(right.mT, left).mT.contiguous()
    return multiply(left.mT, right)


def by_output(products: Tensor, block: tuple[int, int, int], sides: tuple[int, int]) -> Tensor:
    """Return ``[n, K, G, o, i]`` from ``[n, G, Kₗ, o, Kᵣ, i]``, some axes of which may be merged.

    ``block`` is G, o and i, ``sides`` are Kₗ and Kᵣ: the outputs are those of one of the operands.
    """
    (groups, rows, columns), (left, right) = block, sides
    return products.reshape(-1, groups, left, rows, right, columns).movedim((2, 4), (1, 2)).flatten(1, 2)


def weighted_sum(values: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return Σ wᵢ gᵢ, ``[*shape]``, accumulated in ``dtype``; of gradients ``[K, *shape]`` also for ``[B, K]``."""
    if weights is None:
        return values.sum(0, dtype=dtype)
    if weights.ndim == 2:
        return torch.einsum("bk,bk...->k...", weights.to(dtype), values.to(dtype))
    return torch.mm(weights.to(dtype).unsqueeze(0), flat(values.to(dtype))).view(values.shape[1:])


def second_moment(values: Tensor, weights: Tensor | None, dtype: torch.dtype, center: Tensor | None) -> Tensor:
    """Return Σ wᵢ (gᵢ − center)², elementwise ``[*shape]``, accumulated in ``dtype``."""
    given = [x for x in (values, weights, center) if x is not None]
    if not are_plain(given):
        deviations = values.to(dtype) if center is None else values.to(dtype) - center
        return weighted_sum(deviations * deviations, weights, dtype)
    deviations = values.to(dtype, copy=True)  # the one temporary of this size
    if center is not None:
        deviations.sub_(center)
    return weighted_sum(deviations.mul_(deviations), weights, dtype)


def gram(values: Tensor, others: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return ⟨gᵢ, hⱼ⟩, ``[B, B']``, in ``dtype``, by default float32 at least; converted a few columns at a time."""
    dtype = gram_dtype(values.dtype, others.dtype) if dtype is None else dtype
    rows = flat(values)
    others = rows if others is values else flat(others)
    if rows.dtype == others.dtype == dtype:
        return rows @ others.T
    width = rows.shape[1]
    step = cost_model.rows_per_block(width, max(len(rows), len(others)), rows.device, _CONVERTED)

    def products() -> Iterator[Tensor]:
        for start in range(0, max(width, 1), step):
            block = rows[:, start : start + step].to(dtype)
            yield block @ (block if others is rows else others[:, start : start + step].to(dtype)).T

    return functools.reduce(Tensor.add_, products())


def gram_dtype(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the dtype in which inner products of gradients of two dtypes are taken by default."""
    return accumulate_dtype(torch.promote_types(one, other))


def project(values: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return ``left[j]ᵀ gᵢ right[j]``, ``[B, K]``, in float32 at least."""
    rows = flat(values.to(accumulate_dtype(values.dtype)))
    matrices = rows.view(len(rows), left.shape[1], right.shape[1])
    if left.shape[1] > right.shape[1]:  # the longer axis is multiplied first, which leaves less
        matrices, left, right = matrices.mT, right, left
    products = matrices.flatten(0, 1) @ right.to(rows.dtype).T  # of three axes, torch would copy the signs
    return summed(products.view(len(rows), left.shape[1], len(left)) * left.to(rows.dtype).T, 1)


def summed(products: Tensor, axis: int) -> Tensor:
    """Return the sum along an axis, without another pass if the axis has one element."""
    return products.squeeze(axis) if products.shape[axis] == 1 else products.sum(axis)


def sketch(values: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return ``left gᵢ rightᵀ``, ``[B, D, D']``, in float32 at least."""
    rows = flat(values.to(accumulate_dtype(values.dtype)))
    matrices = rows.view(len(rows), left.shape[1], right.shape[1])
    if left.shape[1] > right.shape[1]:  # the longer axis is multiplied first, which leaves less
        return _times(_times(matrices.mT, left).mT, right)
    return _times(_times(matrices, right).mT, left).mT


def _times(rows: Tensor, signs: Tensor) -> Tensor:
    signs = signs.to(rows.dtype).T
    return rows * signs if len(signs) == 1 else rows @ signs


def between(left: Tensor, matrices: Tensor, right: Tensor) -> Tensor:
    """Return LᵀXR; a vector in the place of L or R is the diagonal of a matrix."""
    matrices = left.unsqueeze(-1) * matrices if left.ndim == 1 else left.mT @ matrices
    return matrices * right if right.ndim == 1 else matrices @ right


def per_row(x: Tensor, like: Tensor) -> Tensor:
    """Return a view of ``x [B]``, or ``[B, K]``, that broadcasts along the other axes of ``like [B, ...]``."""
    return x.view(-1, *x.shape[1:], *[1] * (like.ndim - x.ndim))


def split_rows(x: Tensor, count: int) -> Tensor:
    """Return a view ``[B/count, count, ...]`` of ``x [B, ...]``."""
    return x.unflatten(0, (len(x) // count, count))  # -1 is ambiguous where B = 0


def terms_of_rows(x: Tensor, count: int, axis: int) -> Tensor:
    """Return ``x [B, ...]`` with the terms of ``count`` rows beside each other along an axis, counted from the last."""
    between = x.shape[1:axis]
    if between.numel() == 1:  # a view
        return x.reshape(len(x) // count, *between, count * x.shape[axis], *x.shape[x.ndim + axis + 1 :])
    return split_rows(x, count).movedim(1, axis - 1).flatten(axis - 1, axis)


def spread(x: Tensor, places: Tensor, rows: int) -> Tensor:
    """Return ``[rows, ...]`` with the rows of ``x [B, ...]`` at the given places ``[B]``, and zeros elsewhere."""
    zeros = x.new_zeros(rows, *x.shape[1:])
    return zeros.index_copy_(0, places, x) if are_plain([x]) else zeros.index_copy(0, places, x)


def flat(values: Tensor) -> Tensor:
    """Return gradients ``[B, *shape]`` as rows, ``[B, P]``."""
    # A reshape takes as long as a small product; -1 is ambiguous where B = 0.
    return values if values.ndim == 2 else values.reshape(values.shape[0], values.shape[1:].numel())


Pair = tuple[Tensor, Tensor]

# Float32 is sure where (Σₜ ‖lₜ‖ ‖rₜ‖)² is at most this many times ‖Σₜ lₜ rₜᵀ‖². Orthogonal terms of one length give T
# times. An inner product errs by about 5e-8 ‖lₜ‖ ‖lᵤ‖, and the norm by as many times that, if all errors have one sign.
_MOST_CANCELLED = 100
# The mean of ‖lₜ‖ ‖rₜ‖ is also more than this times the largest ‖lₜ‖ or ‖rₜ‖, so neither of the two is tiny, and terms
# whose squares vanish in float32 are too small to count.
_LEAST = 1e-8
# In compiled code, inner products of so few terms are loops of their own; torch's products take 2 to 5 times as long.
_FEW_TERMS = 16
# So few multiply-adds are left to float64.
_SMALL = 2**19


def squared_norms_of_sums(pairs: Sequence[Pair]) -> list[Tensor]:
    """Return ‖Σₜ lₜ rₜᵀ‖², summed over groups, ``[B]`` float64, of pairs ``[B, G, T, o]`` and ``[B, G, T, i]``.

    Inner products of operands that pairs share, as layers with one input do, are computed once.
    """
    keys = [tuple(map(memory_of_rows, pair)) for pair in pairs]
    operands = _by_key(pairs, keys).values()
    if any(map(_needs_float64, operands)) or _are_small(operands):
        return _in_float64(pairs, keys)
    found: dict[int, Tensor] = {}
    shapes = [left.shape[:3] for left, _ in pairs]
    for shape in dict.fromkeys(shapes):
        places = [place for place, other in enumerate(shapes) if other == shape]
        found |= zip(places, _in_float32([pairs[k] for k in places], [keys[k] for k in places]), strict=True)
    return [found[place] for place in range(len(pairs))]


def _in_float32(pairs: Sequence[Pair], keys: Sequence[tuple[Tree, Tree]]) -> Sequence[Tensor]:
    """Return the squared norms of pairs that agree in groups and terms; a few samples at a time, for their T² terms."""
    (count, groups, num_terms, _), device = pairs[0][0].shape, pairs[0][0].device
    step = cost_model.rows_in_cache(count, len(pairs) * groups * num_terms**2, device)
    operands = _by_key(pairs, keys)
    blocks: list[Tensor] = []
    for start in range(0, max(count, 1), step):
        rows = slice(start, start + step)
        products = {key: _inner_products(x[rows]) for key, x in operands.items()}
        left, right = (torch.stack([products[key] for key in side]) for side in zip(*keys, strict=True))
        blocks.append(_checked(left, right, [(x[rows], y[rows]) for x, y in pairs]))
    return (torch.cat(blocks, 1) if len(blocks) > 1 else blocks[0]).unbind()


def _by_key(pairs: Sequence[Pair], keys: Sequence[tuple[Tree, Tree]]) -> dict[Any, Tensor]:
    return {key: x for pair, of_pair in zip(pairs, keys, strict=True) for key, x in zip(of_pair, pair, strict=True)}


def _needs_float64(x: Tensor) -> bool:
    """Return whether to skip float32: it is seldom exact enough, or its check would read a device or a transform."""
    has_many = x.shape[1] * x.shape[2] > cost_model.MOST_TERMS_IN_FLOAT32
    return has_many or x.dtype == torch.float64 or x.device.type != "cpu" or is_recorded(x)


def _are_small(operands: Iterable[Tensor]) -> bool:
    """Return whether float64 takes less time than the checks of float32; a program for any size does not know."""
    return not cost_model.is_for_any_size() and sum(x.numel() * x.shape[2] for x in operands) < _SMALL


def _inner_products(x: Tensor) -> Tensor:
    """Return ⟨xₜ, xᵤ⟩ in float32."""
    x = x.float()
    if not is_for_compiler(x) or x.shape[-2] > _FEW_TERMS:
        return x @ x.mT
    return (x.unsqueeze(-2) * x.unsqueeze(-3)).sum(-1)


def _checked(left: Tensor, right: Tensor, pairs: Sequence[Pair]) -> Tensor:
    """Return the squared norms of pairs, ``[P, B]`` float64."""
    squares = (left * right).sum((2, 3, 4), dtype=torch.float64)
    of_left, of_right = (x.diagonal(dim1=3, dim2=4).flatten(2).double() for x in (left, right))
    lengths = (of_left * of_right).sqrt()  # ‖lₜ‖ ‖rₜ‖
    largest = torch.maximum(of_left.amax(2), of_right.amax(2)).sqrt()
    keeps_digits = lengths.sum(2).square() < _MOST_CANCELLED * squares
    is_sure = keeps_digits & (lengths.mean(2) > _LEAST * largest) & (squares < torch.inf)
    lefts, rights = map(list, zip(*pairs, strict=True))
    if not is_for_compiler(squares):
        return _sure(squares, is_sure, lefts, rights)

    def unchanged(squares: Tensor, *_: Tensor) -> tuple[Tensor]:
        return (squares.clone(),)  # a branch must not return its input

    def corrected(squares: Tensor, is_sure: Tensor, *operands: Tensor) -> tuple[Tensor]:
        return (_in_program.operation(squares, is_sure, operands[: len(pairs)], operands[len(pairs) :]),)

    return cond(is_sure.all(), unchanged, corrected, (squares, is_sure, *lefts, *rights))[0]


def _corrected(squares: Tensor, is_sure: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    """Return squared norms, computed in float64 where they are not sure."""
    doubtful = ~is_sure
    rows = [(left[of_pair], right[of_pair]) for left, right, of_pair in zip(lefts, rights, doubtful, strict=True)]
    exact = [_in_float64([pair], [(0, 1)])[0] for pair in rows]
    return squares.masked_scatter(doubtful, torch.cat(exact)).contiguous()


def _corrected_if_needed(squares: Tensor, is_sure: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    return squares if is_sure.all() else _corrected(squares, is_sure, lefts, rights)


def _like_squares(squares: Tensor, *_: object) -> Tensor:
    return squares.new_empty(squares.shape)


_TYPES = "(Tensor squares, Tensor is_sure, Tensor[] lefts, Tensor[] rights) -> Tensor"
_sure = Opaque(f"sure_norms{_TYPES}", _corrected_if_needed, _like_squares)
_in_program = Opaque(f"corrected_norms{_TYPES}", _corrected, _like_squares)


def _in_float64(pairs: Sequence[Pair], keys: Sequence[tuple[Tree, Tree]]) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for places in _connected(keys):
        found |= zip(places, _of_connected([pairs[k] for k in places], [keys[k] for k in places]), strict=True)
    return [found[place] for place in range(len(pairs))]


def _connected(keys: Sequence[tuple[Tree, Tree]]) -> list[list[int]]:
    """Return the places of pairs that share operands, directly or by others."""
    groups: list[tuple[set[Leaf], list[int]]] = []
    for place, pair in enumerate(keys):
        known, places = set(pair), [place]
        for group in [group for group in groups if not known.isdisjoint(group[0])]:
            groups.remove(group)
            known, places = known | group[0], group[1] + places
        groups.append((known, places))
    return [places for _, places in groups]


def _of_connected(pairs: Sequence[Pair], keys: Sequence[tuple[Tree, Tree]]) -> list[Tensor]:
    """Return the squared norms of pairs, from a few samples at a time, whose copies in float64 stay in the cache."""
    operands, first = _by_key(pairs, keys), pairs[0][0]
    step = cost_model.rows_in_cache(len(first), sum(prod(x.shape[1:]) for x in operands.values()), first.device)
    blocks: list[list[Tensor]] = []
    for start in range(0, max(len(first), 1), step):
        wide = {key: x[start : start + step].double() for key, x in operands.items()}
        products = {key: x @ x.mT for key, x in wide.items()}
        blocks.append([(products[left] * products[right]).sum((1, 2, 3)).clamp_min(0) for left, right in keys])
    return [torch.cat(of_pair) if len(blocks) > 1 else of_pair[0] for of_pair in zip(*blocks, strict=True)]
