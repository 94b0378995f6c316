"""Products of large float32 matrices on CPUs: by oneDNN, where MKL uses but half of the processor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample._torch import mkldnn_linear
from persample.cpu import onednn
from persample.utils.numeric import is_watched, is_wrapped

# Multiplications below which finding oneDNN's kernel takes longer than it saves, and the shortest axis that fills its
# registers (measured, torch 2.13, 2 cores of an AMD EPYC with AVX-512).
_LEAST_WORK = 2**22
_LEAST_SIZE = 16
# Columns for which MKL takes up to 5 times as long as for as many rows (measured there too, in both precisions).
_NARROW = 8


def suits(left: Tensor, right: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether ``product`` takes some operands, and is faster than torch.

    Args:
        left: the first matrix.
        right: the second.
        bias: what is added, or nothing.
    """
    if left.dtype != torch.float32 or not left.ndim == right.ndim == 2:
        return False
    (rows, inner), (paired, columns) = sizes(left), sizes(right)
    if rows * inner * columns < _LEAST_WORK or min(rows, inner, columns) < _LEAST_SIZE:
        return False
    if inner != paired or (bias is not None and sizes(bias) != [columns]):
        return False  # torch says what is wrong
    given = (left, right) if bias is None else (left, right, bias)
    plain = all(x.dtype == torch.float32 and x.device.type == "cpu" for x in given)
    return plain and onednn.computes()


def sizes(x: Tensor) -> list[int]:
    """Return the shape of a tensor, of sizes that vary those of the example."""
    return [int(n.node.hint) if isinstance(n, torch.SymInt) else n for n in x.shape]


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``left @ right + bias``, computed by oneDNN.

    Args:
        left: ``[m, k]`` float32 on the CPU.
        right: ``[k, n]`` likewise.
        bias: ``[n]``, or none.

    Returns:
        ``[m, n]``, its rows side by side in memory.
    """
    # The first operand is read row by row, and copied if it does not lie so; the other may lie either way.
    copied = 0 if left.stride(1) == 1 else left.numel()
    turned = len(left) * right.shape[1] + (0 if right.stride(0) == 1 else right.numel())
    if bias is None and turned < copied:
        return _pointwise(right.T, left).T.contiguous()
    return _pointwise(left, right.T, bias)


def _pointwise(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    bias = None if bias is None else bias.contiguous()
    return mkldnn_linear(rows, _plain(weight), bias, "none", [], "")


def _plain(x: Tensor) -> Tensor:
    return x if x.is_contiguous() or x.T.is_contiguous() else x.contiguous()


def mm(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right``.

    Args:
        left: ``[m, k]``.
        right: ``[k, n]``.

    Returns:
        ``[m, n]``.
    """
    real = not any(is_wrapped(x) or x.requires_grad for x in (left, right))
    return raw_mm(left, right) if real else torch.mm(left, right)


def contracted(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left.mT @ right``, a sum of outer products.

    Args:
        left: ``[..., n, o]``.
        right: ``[..., n, i]``.

    Returns:
        ``[..., o, i]``.
    """
    multiply = mm if left.ndim == 2 else torch.matmul
    if left.device.type == "cpu" and right.shape[-1] <= _NARROW < left.shape[-1]:
        return multiply(right.mT, left).mT.contiguous()
    return multiply(left.mT, right)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``rows @ weight.T + bias``, not differentiated.

    Args:
        rows: ``[n, i]``.
        weight: ``[o, i]``.
        bias: ``[o]``, or none.

    Returns:
        ``[n, o]``.
    """
    if suits(rows, weight.T, bias) and not is_watched():
        return product(rows, weight.T, bias)
    return F.linear(rows, weight, bias)


def raw_mm(left: Tensor, right: Tensor) -> Tensor:
    """Return what ``torch.mm`` does, of plain tensors, not differentiated."""
    faster = suits(left, right) and not is_watched()
    return product(left, right) if faster else torch.mm(left, right)


def raw_addmm(bias: Tensor, left: Tensor, right: Tensor, **scales: Any) -> Tensor:
    """Return what ``torch.addmm`` does, of plain tensors, not differentiated."""
    faster = not scales and suits(left, right, bias) and not is_watched()
    return product(left, right, bias) if faster else torch.addmm(bias, left, right, **scales)
