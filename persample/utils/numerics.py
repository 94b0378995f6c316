"""The elements of tensors: their dtypes, their layout in memory, and squared norms, accurate for any magnitude."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.linalg import vector_norm

from persample._torch import is_zerotensor, keep_strides, storage_id
from persample.utils.tracing import (
    Opaque,
    are_free_to_read,
    holds,
    is_for_compiler,
    is_recorded,
    is_traced,
    is_wrapped,
    unwrapped,
)
from persample.utils.trees import Tree, map_tensors

P = ParamSpec("P")
T = TypeVar("T")


@functools.cache
def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the real dtype in which values of a dtype are summed: float64 for doubles, else float32."""
    return torch.promote_types(dtype.to_real(), torch.float32)


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype of a number computed from all parameters: the widest of their real dtypes, at least float32."""
    return functools.reduce(torch.promote_types, set(map(accumulate_dtype, dtypes)) - {torch.float32}, torch.float32)


def as_real(x: Tensor) -> Tensor:
    """Return a complex tensor as pairs of reals (one more axis of size 2), and any other tensor unchanged."""
    x = x.clone() if is_zerotensor(x) else x  # a zero tensor (torch's gradient of sgn) has no memory to view
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def restore(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a real tensor in another dtype (None: unchanged); pairs of reals become complex numbers again."""
    if dtype is None:
        return x
    real = x.to(dtype.to_real())
    return torch.view_as_complex(real.contiguous()) if dtype.is_complex else real


def scaled_rows(x: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return wᵢ xᵢ for ``x [B, ...]`` and ``weights [B]`` (or ``[B, K]``), in a dtype."""
    return x.to(dtype) * weights.to(dtype).view(-1, *weights.shape[1:], *[1] * (x.ndim - weights.ndim))


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without the caller's autocast, which applies to the loss, not to reductions of its gradients."""
    return torch.autocast(device.type, enabled=False) if is_autocast(device) else nullcontext()


def is_autocast(device: torch.device) -> bool:
    """Return whether operations on a device run under autocast; some types of devices do not support it."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def autocast(x: Tensor) -> Tensor:
    """Return a tensor as matrix products read it: under the caller's autocast, in its dtype."""
    narrowed = is_autocast(x.device) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(x.device.type)) if narrowed else x


def in_single_precision(x: Tensor) -> Tensor:
    """Return a tensor as autocast passes it to single-precision functions: doubles and integers as they are."""
    return x.float() if x.is_floating_point() and x.dtype != torch.float64 else x


def precast(
    cast: Callable[[Tensor], Tensor], device: torch.device, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call a function without autocast, on tensors cast here: under autocast torch.func differentiates no kernel."""
    args, kwargs = map_tensors(cast, (args, kwargs))
    with full_precision(device):
        return function(*args, **kwargs)


def laid_out(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a tensor without gaps in memory, its axes in the order of ``like``; in compiled code contiguous."""
    if is_for_compiler(x):
        return keep_strides(x.contiguous())  # otherwise Inductor would remove the copy
    if like is None:
        return x.contiguous()
    order = sorted(range(x.ndim), key=like.stride, reverse=True)
    return x.permute(order).contiguous().permute([order.index(axis) for axis in range(x.ndim)])


def storage_key(x: Tensor) -> int:
    """Return what identifies the memory of a tensor, of one inside of the wrappers of ``torch.func``, too."""
    x = unwrapped(x)
    return storage_id(x.untyped_storage()) if x.layout is torch.strided else id(x)


def memory(x: Tensor) -> int:
    """Return the address of the storage of a tensor, 0 for a tensor that ``torch.func`` wraps."""
    return 0 if is_wrapped(x) else (x.to_local() if hasattr(x, "to_local") else x).untyped_storage().data_ptr()


def is_sharded(x: object) -> bool:
    """Return whether a value is a DTensor, whose import takes a second."""
    return hasattr(x, "device_mesh")


def settled(x: Tree) -> Tensor:
    """Return a DTensor without terms that are spread over processes, and without uneven parts, which have no views.

    Else every use of the tensor would add up the terms again.
    """
    places = getattr(x, "placements", ())
    sizes = [x.device_mesh.size(axis) for axis in range(len(places))]
    pairs = [*zip(places, sizes, strict=True)]
    if not any(place.is_partial() or (place.is_shard() and x.shape[place.dim] % size) for place, size in pairs):
        return x
    from torch.distributed.tensor import Replicate  # which takes a second

    is_even = [place.is_shard() and x.shape[place.dim] % size == 0 for place, size in pairs]
    return x.redistribute(placements=[y if even else Replicate() for y, even in zip(places, is_even, strict=True)])


def is_folded(x: Tensor) -> bool:
    """Return whether the strides of a tensor allow that several elements share a place in memory."""
    if x.is_contiguous() or not x.numel():
        return False
    reach = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += stride * (size - 1)
    return False


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
    """Return the squared Euclidean norm of every row of ``x [B, ...]`` as ``[B]`` float64."""
    return squared_norms_of_each([x])[0]


def squared_norms_of_each(tensors: Sequence[Tensor], axes: int = 1) -> Sequence[Tensor]:
    """Return the squared norms of the rows of tensors ``[B, ...]``, ``[B]`` float64 each; for 2 axes, ``[B, K]``.

    The magnitudes of all norms are checked at once. Tensors that share memory (a bias and its signals) share one norm.
    """
    if axes > 1:
        squares = squared_norms_of_each([x.flatten(0, axes - 1) for x in tensors])
        return [square.view(x.shape[:axes]) for square, x in zip(squares, tensors, strict=True)]
    all_rows = [x if x.ndim == 2 else x.flatten(1) if x.ndim > 1 else x.unsqueeze(1) for x in tensors]
    keys = list(map(memory_of_rows, all_rows))
    distinct = dict(zip(keys, all_rows, strict=True))
    rows = list(distinct.values())
    if rows and are_free_to_read(rows):
        squares = _joined(rows).square().split_with_sizes([x.shape[0] for x in rows])
    else:
        squares = _unchecked(rows)
    found = dict(zip(distinct, squares, strict=True))
    return [found[key] for key in keys]


def root(squared: Tensor) -> Tensor:
    """Return the square roots of squared norms, with a derivative of 0 at 0, as ``torch.linalg.vector_norm`` has."""
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


def memory_of_rows(rows: Tensor) -> Tree:
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
    if are_free_to_read([x]) and _within(x, 1 / bound, bound):
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


# glibc maps a block of this size alone; its limit is 32 MiB, with a header. Once one is freed, the next is in the heap.
_LARGEST = 2**25 - 2**16


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep what is freed, up to 64 MiB in each thread, as it does once any block of 32 MiB was freed.

    glibc keeps at most twice the largest block that it ever mapped and freed. A call frees tens of smaller blocks at
    once. Without this, the next call meets fresh pages, which the system clears: up to a third of the time of a call.
    The block is not written, so it takes no memory. Where glibc's variables or another C library decide, nothing
    changes.

    References:
        ``M_MMAP_THRESHOLD`` and ``M_TRIM_THRESHOLD`` in the manual page mallopt(3).
    """
    with contextlib.suppress(RuntimeError):  # no room for the block: the program may have enough
        torch.UntypedStorage(_LARGEST, device="cpu")
