"""Squared Euclidean norms of rows, accurate for float32 numbers of any magnitude."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from persample._torch import storage_id
from persample.utils.dtypes import accumulate_dtype
from persample.utils.tracing import holds, is_free_to_read, is_recorded, is_traced, is_wrapped

# Long enough to be about as fast as one flat norm, short enough that float32 loses little inside a block: over 30
# million elements a flat float32 norm errs by 14 000 eps, blocks of this length by less than 0.2; where all elements
# are equal, and so are their roundings, by less than 4, and blocks of 1024 by 8 (measured, torch 2.13, CPU).
_BLOCK = 512
# Compiled code may add up a strided block number by number. Norms of equal numbers, whose roundings add up, then err by
# up to 4 eps in blocks of this length, and by 16 in blocks of 256 (measured, torch 2.13, CPU).
_COMPILED_BLOCK = 64


def squared_norms(x: Tensor) -> Tensor:
    """Return the squared Euclidean norm of every row of ``x [B, ...]`` as ``[B]`` float64.

    Blocks are reduced in the tensor's own precision (float32 for half formats) and added up in float64.

    Examples:
        >>> squared_norms(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([25.,  0.], dtype=torch.float64)
    """
    return squared_norms_of_each([x])[0]


def squared_norms_of_each(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the squared norms of the rows of several tensors.

    The magnitudes of all norms are checked at once. Tensors that share memory (a bias and its signals) share one norm.

    Args:
        tensors: ``[B, ...]`` each.

    Returns:
        ``[B]`` float64 each.
    """
    all_rows = [_rows(x) for x in tensors]
    checked: dict[Any, tuple[Tensor, Tensor]] = {}
    for rows in all_rows:
        if not _needs_no_check(rows) and memory_of_rows(rows) not in checked:
            checked[memory_of_rows(rows)] = rows, _blockwise(rows)
    _recompute_extreme_rows(list(checked.values()))
    return [_unchecked(rows) if _needs_no_check(rows) else checked[memory_of_rows(rows)][1] for rows in all_rows]


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
    size = x.abs()
    if is_free_to_read(x) and _within(size, 1 / bound, bound):  # the usual case: fast
        return False
    return holds(((size != 0) & ~((size > 1 / bound) & (size < bound))).any())


def _rows(x: Tensor) -> Tensor:
    rows = x.flatten(1) if x.ndim > 1 else x.unsqueeze(1)
    return rows.to(accumulate_dtype(x.dtype))


def memory_of_rows(rows: Tensor) -> Any:
    """Return a key that tensors share if they are the same part of memory; it is valid as long as ``rows`` is alive."""
    place = id(rows) if is_wrapped(rows) else (storage_id(rows.untyped_storage()), rows.storage_offset())
    return place, rows.shape, rows.stride(), rows.dtype


def _needs_no_check(rows: Tensor) -> bool:
    return is_recorded(rows) or not is_free_to_read(rows) or not rows.numel() or (len(rows) > 1 and rows.stride(0) == 0)


def _unchecked(rows: Tensor) -> Tensor:
    is_unread = rows.dtype == torch.float32 and not is_free_to_read(rows)
    if is_unread and is_traced(rows) and not is_recorded(rows):
        return _of_all_magnitudes(rows)
    if is_unread or is_recorded(rows):
        return rows.double().square().sum(1)  # float64 holds all squares of float32
    if len(rows) > 1 and rows.stride(0) == 0:  # one row for all samples
        return squared_norms(rows[:1]).expand(len(rows))
    squared = _blockwise(rows)
    return _scaled(rows, squared) if rows.numel() else squared


def _recompute_extreme_rows(norms: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Recompute in place, on scaled rows, the norms whose squares float32 cannot hold.

    Squares of numbers below 1e-19 vanish in float32, and those of numbers above 1e19 overflow.

    Args:
        norms: rows and their squared norms.
    """
    if not norms:
        return
    least = max(torch.finfo(rows.dtype).tiny for rows, _ in norms) ** 0.5
    if _within(torch.cat([squared for _, squared in norms]) if len(norms) > 1 else norms[0][1], least):
        return
    for rows, squared in norms:
        doubtful = ~((squared > least) & (squared < torch.inf))
        squared[doubtful] = _scaled(rows[doubtful], squared[doubtful])


def _of_all_magnitudes(rows: Tensor) -> Tensor:
    """Return squared norms without a look at values: scaled squares are added up beside the others (Blue, 1978).

    Compiled code does so in one pass. Its conversions to float64 take longer than all three sums.
    """
    scales = (1.0, 2.0**92, 2.0**-80)
    usual, small, large = (_blockwise(rows * scale, _COMPILED_BLOCK) / scale**2 for scale in scales)
    is_small, is_large = usual < torch.finfo(rows.dtype).tiny ** 0.5, usual == torch.inf
    return torch.where(is_small, small, torch.where(is_large, large, usual))


def _within(x: Tensor, least: float, most: float = torch.inf) -> bool:
    """Return whether all values lie strictly between two bounds; NaN does not."""
    low, high = x.aminmax()
    return least < low.item() and high.item() < most


def _scaled(rows: Tensor, squared: Tensor) -> Tensor:
    largest = torch.linalg.vector_norm(rows, ord=torch.inf, dim=1)
    regular = largest.isfinite() & (largest > 0)
    scale = torch.where(regular, largest, 1)
    return torch.where(regular, _blockwise(rows / scale[:, None]) * scale.double().square(), squared)


def _blockwise(rows: Tensor, length: int = _BLOCK) -> Tensor:
    blocks, rest = divmod(rows.shape[1], length)
    if not blocks:
        return _squared(rows)
    whole = _squared(rows[:, : blocks * length].unflatten(1, (blocks, length))).sum(1)
    return whole + _squared(rows[:, blocks * length :]) if rest else whole


def _squared(x: Tensor) -> Tensor:
    if not is_traced(x) and (x.stride(-1) == 1 or x.shape[-1] == 1):
        return torch.linalg.vector_norm(x, dim=-1).double().square()
    return x.square().sum(-1).double()  # for a strided axis ten times as fast as vector_norm
