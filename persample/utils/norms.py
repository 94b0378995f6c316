"""Squared Euclidean norms of rows, accurate for float32 numbers of any magnitude."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from persample._torch import storage_id
from persample.utils.dtypes import accumulate_dtype
from persample.utils.tracing import Opaque, are_free_to_read, holds, is_recorded, is_traced, is_wrapped

# Float64 holds the squares of all float32 numbers, so its norms need no check. Of so few elements they take as long as
# float32 norms and the check do; of many, 5 to 10 times as long (torch 2.13, AMD EPYC and Intel Xeon).
_FEW = 2**14
# Long enough to be about as fast as one flat norm, short enough that float32 loses little inside a block: over 30
# million elements a flat float32 norm errs by 14 000 eps, blocks of this length by less than 0.2; where all elements
# are equal, and so are their roundings, by less than 4, and blocks of 1024 by 8 (measured, torch 2.13, CPU).
_BLOCK = 512
# Squares of float32 numbers below 1e-19 vanish, and of float64 numbers below 1e-154; beside norms above these they do
# not count.
_LEAST, _LEAST64 = 1e-9, 1e-140


def squared_norms(x: Tensor) -> Tensor:
    """Return the squared Euclidean norm of every row of ``x [B, ...]`` as ``[B]`` float64.

    Examples:
        >>> squared_norms(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([25.,  0.], dtype=torch.float64)
    """
    return squared_norms_of_each([x])[0]


def squared_norms_of_each(tensors: Sequence[Tensor], axes: int = 1) -> Sequence[Tensor]:
    """Return the squared norms of the rows of several tensors.

    The magnitudes of all norms are checked at once. Tensors that share memory (a bias and its signals) share one norm.

    Args:
        tensors: ``[B, ...]`` each.
        axes: how many of the first axes number the rows: 2 for ``[B, K, ...]``.

    Returns:
        ``[B]`` float64 each, or ``[B, K]``.
    """
    if axes > 1:
        squares = squared_norms_of_each([x.flatten(0, axes - 1) for x in tensors])
        return [square.view(x.shape[:axes]) for square, x in zip(squares, tensors, strict=True)]
    all_rows = [x if x.ndim == 2 else x.flatten(1) if x.ndim > 1 else x.unsqueeze(1) for x in tensors]
    keys = list(map(memory_of_rows, all_rows))
    distinct = dict(zip(keys, all_rows, strict=True))
    squares = (_checked if are_free_to_read(all_rows) else _unchecked)(list(distinct.values()))
    found = dict(zip(distinct, squares, strict=True))
    return [found[key] for key in keys]


def root(squared: Tensor) -> Tensor:
    """Return the square roots of squared norms, with a derivative of 0 at 0, as ``torch.linalg.vector_norm`` has.

    Examples:
        >>> x = torch.tensor([0.0, 4.0], requires_grad=True)
        >>> torch.autograd.grad(root(x).sum(), x)
        (tensor([0.0000, 0.2500]),)
    """
    if not is_recorded(squared):
        return squared.sqrt()
    zero = squared == 0
    return torch.where(zero, 0, torch.where(zero, 1, squared).sqrt())


def has_extreme(x: Tensor, bound: float = 1e30) -> bool:
    """Return whether ``x [B]`` has an entry, other than 0, larger than a bound or smaller than the bound's inverse."""
    if not x.numel() or is_wrapped(x):
        return False
    if are_free_to_read([x]) and not is_traced(x) and _within(x, 1 / bound, bound):  # the usual case: fast
        return False
    return holds(_is_extreme(x, bound))


def memory_of_rows(rows: Tensor) -> Any:
    """Return a key that tensors share if they are the same part of memory; it is valid as long as ``rows`` is alive."""
    place = id(rows) if is_wrapped(rows) else (storage_id(rows.untyped_storage()), rows.storage_offset())
    return place, rows.shape, rows.stride(), rows.dtype


def _unchecked(all_rows: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return squared norms without a look at values, by arithmetic that autograd and compiled code take."""
    is_wide = [rows.dtype == torch.float64 and not is_recorded(rows) and rows.numel() for rows in all_rows]
    return [
        _scaled(rows).square() if wide else rows.double().square().sum(1)
        for rows, wide in zip(all_rows, is_wide, strict=True)
    ]


def _checked(all_rows: list[Tensor]) -> Sequence[Tensor]:
    return _joined(all_rows).square().split_with_sizes([rows.shape[0] for rows in all_rows]) if all_rows else []


def _checked_norms(all_rows: list[Tensor]) -> Tensor:
    """Return the norms of the rows of all tensors, one after the other, float64."""
    joined = torch.cat(list(map(_norms, all_rows))).double()  # a copy, also of one norm for all samples
    sizes = [rows.shape[0] for rows in all_rows]
    pairs = zip(all_rows, joined.split_with_sizes(sizes), strict=True)
    doubtful = [(x, norm) for x, norm in pairs if x.numel() > _FEW or (x.numel() and x.dtype == torch.float64)]
    least = max((_LEAST if x.dtype != torch.float64 else _LEAST64 for x, _ in doubtful), default=0.0)
    if doubtful and not _within(joined, least):
        for rows, norm in doubtful:
            extreme = ~((norm > least) & (norm < torch.inf))
            norm[extreme] = _scaled(rows[extreme])
    return joined


def _extreme(x: Tensor, bound: float) -> Tensor:
    """Return whether ``x [B]`` has an extreme entry, a 0-d bool tensor; see ``has_extreme``."""
    if are_free_to_read([x]) and not is_traced(x) and _within(x, 1 / bound, bound):
        return torch.zeros((), dtype=torch.bool)
    size = x.abs()
    return ((size != 0) & ~((size > 1 / bound) & (size < bound))).any()


_joined = Opaque(
    "joined_norms(Tensor[] all_rows) -> Tensor",
    _checked_norms,
    lambda all_rows: all_rows[0].new_empty(sum(rows.shape[0] for rows in all_rows), dtype=torch.float64),
)
_is_extreme = Opaque(
    "is_extreme(Tensor x, float bound) -> Tensor", _extreme, lambda x, _: x.new_empty((), dtype=torch.bool)
)


def _norms(rows: Tensor) -> Tensor:
    """Return norms, float64 or float32; of many rows those of blocks are float32, and may over- or underflow."""
    if rows.shape[0] > 1 and rows.stride(0) == 0:  # one row for all samples
        return _norms(rows[:1]).expand(rows.shape[0])
    if rows.numel() <= _FEW:
        return vector_norm(rows, dim=1, dtype=torch.float64)
    rows = rows.to(accumulate_dtype(rows.dtype))
    count, rest = divmod(rows.shape[1], _BLOCK)
    if not count or rows.dtype == torch.float64:
        return _flat_norms(rows)
    blocks = _flat_norms(rows[:, : count * _BLOCK].unflatten(1, (count, _BLOCK)))
    if rest:
        blocks = torch.cat([blocks, _flat_norms(rows[:, count * _BLOCK :]).unsqueeze(1)], 1)
    return vector_norm(blocks, dim=1, dtype=torch.float64)


def _flat_norms(x: Tensor) -> Tensor:
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return vector_norm(x, dim=-1)
    return x.square().sum(-1).sqrt()  # for a strided axis ten times as fast as vector_norm


def _scaled(rows: Tensor) -> Tensor:
    """Return norms of rows whose squares their dtype may not hold, ``[B]`` float64."""
    if rows.dtype != torch.float64:
        return vector_norm(rows, dim=1, dtype=torch.float64)
    largest = vector_norm(rows, ord=torch.inf, dim=1)
    scale = torch.where(largest.isfinite() & (largest > 0), largest, 1)
    return vector_norm(rows / scale[:, None], dim=1) * scale


def _within(x: Tensor, least: float, most: float = torch.inf) -> bool:
    """Return whether all values lie strictly between two bounds; NaN does not."""
    low, high = x.aminmax()
    return least < low.item() and high.item() < most
