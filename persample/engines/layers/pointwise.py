"""Pointwise functions of torch: each number of the result is computed of one number of each argument."""

from __future__ import annotations

import functools
from typing import Any

import torch

# The names of operations by the names of methods and functions that compute the same.
_ALIASES = {"truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub"}


@functools.cache
def is_pointwise(func: Any) -> bool:
    """Return whether a function of torch is pointwise, as torch tags its operations.

    Examples:
        >>> from torch import Tensor
        >>> is_pointwise(Tensor.add_), is_pointwise(Tensor.__rtruediv__), is_pointwise(torch.where)
        (True, True, True)
        >>> is_pointwise(Tensor.matmul), is_pointwise(torch.sum), is_pointwise(Tensor.__getitem__)
        (False, False, False)
    """
    full = str(getattr(func, "__name__", ""))
    name = full.strip("_")
    if full.startswith("__") and name[:1] in {"r", "i"}:  # reflected, or in place
        name = name[1:]
    packet = getattr(torch.ops.aten, _ALIASES.get(name, name), None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, x).tags for x in packet.overloads())
