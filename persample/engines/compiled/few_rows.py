"""Products of few rows with a large matrix, in parts: MKL leaves much of one such product to one thread.

Recurrent layers of small batches consist of them. Two threads take 110 µs for ``[4, 360] @ [360, 1440]``, and 76 µs in
two parts. With 1 to 32 rows and sides of 360 to 2048, parts took 0.4 to 1.1 times as long as the whole with two
threads, and about as long with one (float32, AMD EPYC, torch 2.13). float64, bfloat16 and short sides took longer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_MOST_ROWS = 32
_SMALLEST_MATRIX = 2**17
_SHORTEST_SIDE = 64  # of a part

_aten = torch.ops.aten


def with_parts(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return a table of decompositions in which such products are batches of products.

    Args:
        table: the decompositions of all operations of aten.
    """
    return {
        **table,
        _aten.mm.default: functools.partial(_mm, table[_aten.mm.default]),
        _aten.addmm.default: functools.partial(_addmm, table[_aten.addmm.default]),
    }


def _mm(otherwise: Callable[..., Any], left: Tensor, right: Tensor) -> Any:
    product = _in_parts(left, right)
    return otherwise(left, right) if product is None else product


def _addmm(otherwise: Callable[..., Any], bias: Tensor, left: Tensor, right: Tensor, **factors: Any) -> Any:
    product = None if factors else _in_parts(left, right)
    return otherwise(bias, left, right, **factors) if product is None else bias + product


def _in_parts(left: Tensor, right: Tensor) -> Tensor | None:
    """Return ``left @ right`` as products with parts of the larger operand, or None where one product is as fast."""
    if left.device.type != "cpu" or left.dtype != torch.float32:
        return None
    is_left = left.numel() > right.numel()
    matrix, rows, columns = (left, right.shape[1], left.shape[0]) if is_left else (right, left.shape[0], right.shape[1])
    parts = math.gcd(columns, torch.get_num_threads())
    is_large = matrix.numel() >= _SMALLEST_MATRIX and min(left.shape[1], columns // parts) >= _SHORTEST_SIDE
    if parts == 1 or rows > _MOST_ROWS or not is_large:
        return None
    if is_left:  # laid out as the whole product
        return torch.bmm(left.unflatten(0, (parts, -1)), right.expand(parts, -1, -1)).flatten(0, 1)
    matrices = right.unflatten(1, (parts, -1)).transpose(0, 1)
    return torch.bmm(left.expand(parts, -1, -1), matrices).transpose(0, 1).flatten(1)
