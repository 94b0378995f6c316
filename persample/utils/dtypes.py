"""Dtypes: accumulation in higher precision, complex numbers as pairs of reals, and autocast."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from persample._torch import is_zerotensor


@functools.cache
def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the real dtype in which values of a dtype are summed: float64 for doubles, else float32.

    Examples:
        >>> accumulate_dtype(torch.bfloat16), accumulate_dtype(torch.complex128)
        (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype.to_real(), torch.float32)


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype of a number computed from all parameters: the widest of their real dtypes, at least float32."""
    return functools.reduce(torch.promote_types, set(map(accumulate_dtype, dtypes)) - {torch.float32}, torch.float32)


def as_real(x: Tensor) -> Tensor:
    """Return a complex tensor as pairs of reals (one more axis of size 2), and any other tensor unchanged."""
    x = x.clone() if is_zerotensor(x) else x  # a zero tensor (torch's gradient of sgn) has no memory to view
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def restore(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a real tensor in another dtype; pairs of reals become complex numbers again.

    Args:
        x: the tensor.
        dtype: the dtype of the result, or None to return ``x`` unchanged.
    """
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
    """Return a tensor as matrix products read it: under the caller's autocast, in its dtype.

    Args:
        x: the tensor.
    """
    narrowed = is_autocast(x.device) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(x.device.type)) if narrowed else x


def in_single_precision(x: Tensor) -> Tensor:
    """Return a tensor as autocast gives it to what it computes in single precision: doubles and integers as they are.

    Args:
        x: the tensor.
    """
    return x.float() if x.is_floating_point() and x.dtype != torch.float64 else x
