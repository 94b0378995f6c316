"""Number formats: what is accumulated in which dtype, and complex numbers as pairs of reals."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from persample._torch import (
    FakeTensor,
    disable_current_modes,
    is_functorch_wrapped_tensor,
    is_zerotensor,
    keep_strides,
    len_torch_dispatch_stack,
)
from persample.utils.flags import flags

# Long enough to be as fast as one flat norm, short enough that float32 loses nothing inside a block: over 30 million
# elements a flat float32 norm errs by 14 000 eps, blocks of this length by less than 0.2 (measured, torch 2.13, CPU).
_BLOCK = 1024


@functools.cache
def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the real dtype in which sums of values of a dtype are accumulated: float32, or float64 for doubles.

    Examples:
        >>> accumulate_dtype(torch.bfloat16), accumulate_dtype(torch.complex128)
        (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype.to_real(), torch.float32)


def as_real(x: Tensor) -> Tensor:
    """Return a complex tensor as pairs of reals (one more axis of size 2), any other as it is; zeros with memory."""
    x = x.clone() if is_zerotensor(x) else x  # torch's gradient of sgn, say, which nobody could read or write
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def restore(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a real tensor in the dtype asked for; pairs of reals become complex numbers again."""
    if dtype is None:
        return x
    real = x.to(dtype.to_real())
    return torch.view_as_complex(real.contiguous()) if dtype.is_complex else real


def laid_out(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a tensor with its elements side by side in memory, also in compiled code, which would gather them anew.

    Args:
        x: the tensor.
        like: one of as many axes, whose order in memory it takes; in compiled code its own.
    """
    if is_traced(x):
        return keep_strides(x.contiguous())
    if like is None:
        return x.contiguous()
    order = sorted(range(x.ndim), key=like.stride, reverse=True)
    return x.permute(order).contiguous().permute([order.index(axis) for axis in range(x.ndim)])


def is_folded(x: Tensor) -> bool:
    """Return whether several elements of a tensor are, or by their strides might be, the same place in memory."""
    if x.is_contiguous() or not x.numel():
        return False
    reach = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += stride * (size - 1)
    return False


# Whether a tensor is seen through a vmap or grad of the caller's, so that its values cannot be read.
is_wrapped: Callable[[Tensor], bool] = is_functorch_wrapped_tensor


def is_traced(x: Tensor) -> bool:
    """Return whether a tensor stands for any values of its shape, so that nothing can be decided by them."""
    return isinstance(x, FakeTensor)


def is_watched() -> bool:
    """Return whether a mode of the caller's (that counts, traces, fakes) looks for the operations of torch."""
    return len_torch_dispatch_stack() > 0


@contextmanager
def exceptions_noted() -> Iterator[list[Tensor]]:
    """Note, while a program is traced, the exceptional cases that it leaves out.

    Yields:
        0-d bool tensors: where one of them holds, the program's results do not count.
    """
    noted: list[Tensor] = []
    before, flags.noted = getattr(flags, "noted", None), noted
    try:
        yield noted
    finally:
        flags.noted = before


@contextmanager
def known_indices() -> Iterator[None]:
    """Say that indices used meanwhile are made of such as the loss used: if those are in range, so are these."""
    before, flags.known = has_known_indices(), True
    try:
        yield
    finally:
        flags.known = before


def has_known_indices() -> bool:
    """Return whether indices are made of others that were looked at already."""
    return getattr(flags, "known", False)


@contextmanager
def untraced() -> Iterator[None]:
    """Compute with real tensors meanwhile, also in the midst of a trace."""
    with disable_current_modes():
        yield


def holds(exceptional: Tensor) -> bool:
    """Return whether an exceptional case is there; a program that is traced assumes that it is not, and notes it.

    Args:
        exceptional: a 0-d bool tensor.
    """
    if not is_traced(exceptional):
        return bool(exceptional)
    if getattr(flags, "noted", None) is not None:
        flags.noted.append(exceptional)
    return False


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype of numbers that speak of all parameters at once: the widest real one, float32 at least."""
    return functools.reduce(torch.promote_types, map(accumulate_dtype, dtypes), torch.float32)


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which the caller's autocast is off: it is meant for the loss, not for what is made of it."""
    return torch.autocast(device.type, enabled=False) if is_autocast(device) else nullcontext()


def is_autocast(device: torch.device) -> bool:
    """Return whether operations on a device are under autocast, which not every kind of device knows."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def exceeds(x: Tensor, bound: float = 1e30) -> bool:
    """Return whether some entry of ``x [B]``, other than 0, is larger than a bound or smaller than its inverse."""
    if not x.numel() or is_wrapped(x) or (not is_traced(x) and _within(x, 1 / bound, bound)):  # as a rule all positive
        return False
    return holds(((x != 0) & ~((x.abs() > 1 / bound) & (x.abs() < bound))).any())


def scaled_rows(x: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return wᵢ xᵢ for ``x [B, ...]`` and ``weights [B]``, in a dtype."""
    return x.to(dtype) * weights.to(dtype).view(-1, *[1] * (x.ndim - 1))


def squared_norms(x: Tensor) -> Tensor:
    """Return the squared Euclidean norm of every row of ``x [B, ...]`` as ``[B]`` float64.

    Blocks are reduced in the tensor's own precision (float32 for half formats) and added up in float64.

    Examples:
        >>> squared_norms(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([25.,  0.], dtype=torch.float64)
    """
    rows = x.flatten(1) if x.ndim > 1 else x.unsqueeze(1)
    rows = rows.to(accumulate_dtype(x.dtype))
    if is_wrapped(rows) or (is_traced(rows) and rows.dtype == torch.float32):  # whose squares are all doubles
        return rows.double().square().sum(1)
    if len(rows) > 1 and rows.stride(0) == 0:  # one row for all samples
        return squared_norms(rows[:1]).expand(len(rows))
    pool: _Pool | None = getattr(flags, "pool", None)
    if pool is not None and not is_traced(rows) and rows.untyped_storage().data_ptr() in pool.memory:
        return pool.squared(rows)
    squared = _blockwise(rows)
    if is_traced(rows) and rows.numel():
        return _scaled(rows, squared)
    _mend([(rows, squared)])
    return squared


class _Pool:
    """Squared norms that are looked at together, those of the same rows computed once.

    Args:
        lasting: tensors that live at least as long as the pool.
    """

    def __init__(self, lasting: Iterable[Tensor]) -> None:
        self.memory = {x.untyped_storage().data_ptr() for x in lasting if not (is_wrapped(x) or is_traced(x))}
        self.norms: dict[Any, tuple[Tensor, Tensor]] = {}

    def squared(self, rows: Tensor) -> Tensor:
        """Return the squared norms of rows, not looked at yet."""
        key = rows.data_ptr(), rows.shape, rows.stride(), rows.dtype
        if key not in self.norms:
            self.norms[key] = rows, _blockwise(rows)
        return self.norms[key][1]


def together(lasting: Iterable[Tensor], compute: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Compute several norms with one look at all magnitudes, and those of the same rows (of a bias and a signal) once.

    Args:
        lasting: the tensors whose norms may be looked at together, alive anyway.
        compute: calls ``squared_norms``; called again if norms were mended.

    Returns:
        What it returns.
    """
    flags.pool = pool = _Pool(lasting)
    try:
        result = compute()
        return compute() if _mend(list(pool.norms.values())) else result
    finally:
        flags.pool = None


def _mend(norms: list[tuple[Tensor, Tensor]]) -> bool:
    """Compute squared norms anew where float32 is too narrow for squares; return whether there were any."""
    # Squares of numbers below 1e-19 vanish in float32, those above 1e19 overflow: such rows are scaled to 1 first.
    norms = [(rows, squared) for rows, squared in norms if rows.numel()]
    if not norms:
        return False
    least = max(torch.finfo(rows.dtype).tiny for rows, _ in norms) ** 0.5
    if _within(torch.cat([squared for _, squared in norms]) if len(norms) > 1 else norms[0][1], least):
        return False
    for rows, squared in norms:
        doubtful = ~((squared > least) & (squared < torch.inf))
        squared[doubtful] = _scaled(rows[doubtful], squared[doubtful])
    return True


def _within(x: Tensor, least: float, most: float = torch.inf) -> bool:
    """Return whether all values lie strictly between two bounds; no NaN does."""
    low, high = x.aminmax()
    return least < low.item() and high.item() < most


def _scaled(rows: Tensor, squared: Tensor) -> Tensor:
    largest = torch.linalg.vector_norm(rows, ord=torch.inf, dim=1)
    regular = largest.isfinite() & (largest > 0)
    scale = torch.where(regular, largest, 1)
    return torch.where(regular, _blockwise(rows / scale[:, None]) * scale.double().square(), squared)


def _blockwise(rows: Tensor) -> Tensor:
    blocks, rest = divmod(rows.shape[1], _BLOCK)
    if not blocks:
        return _squared(rows)
    whole = _squared(rows[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK))).sum(1)
    return whole + _squared(rows[:, blocks * _BLOCK :]) if rest else whole


def _squared(x: Tensor) -> Tensor:
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return torch.linalg.vector_norm(x, dim=-1).double().square()
    return x.square().sum(-1).double()  # across memory, ten times as fast
