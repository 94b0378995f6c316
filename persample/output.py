"""The argument ``out``: a previous result whose storage is written again."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from persample import trees
from persample.errors import ArgumentError


def write_into(out: Any, result: Any) -> Any:
    """Write a result into the storage of a previous one.

    Args:
        out: a previous result: the same structure, shapes, dtypes and devices.
        result: what was computed now.

    Returns:
        ``out``.

    Raises:
        ArgumentError: if ``out`` does not fit; nothing is written then.

    Example:
        >>> import torch
        >>> storage = {"w": torch.zeros(2)}
        >>> write_into(storage, {"w": torch.ones(2)}) is storage, storage["w"]
        (True, tensor([1., 1.]))
    """
    leaves, structure = trees.flatten(result)
    targets, found = trees.flatten(out)
    fix = "Pass what the same call returned before."
    if found != structure:
        raise ArgumentError.about("out", expected=f"the structure {structure}", received=f"{found}", fix=fix)
    for path, leaf, target in zip(trees.paths(out, "out"), leaves, targets, strict=True):
        if not isinstance(leaf, Tensor):
            fix = "Leave out=None for Factored()."
            raise ArgumentError.about(path, expected="a result of tensors", received=type(leaf).__name__, fix=fix)
        if not isinstance(target, Tensor) or _format(target) != _format(leaf):
            received = _format(target) if isinstance(target, Tensor) else type(target).__name__
            raise ArgumentError.about(path, expected=_format(leaf), received=received, fix=fix)
    for leaf, target in zip(leaves, targets, strict=True):
        target.copy_(leaf)
    return out


def _format(x: Tensor) -> str:
    return f"shape {list(x.shape)}, {x.dtype} on {x.device}"
