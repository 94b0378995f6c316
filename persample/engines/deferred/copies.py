"""Copies that torch makes of an input for each of K outputs, known by their origin: the input itself is enough."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class _Copy:
    copy: weakref.ref[Tensor]
    source: Tensor
    count: int


class OutputCopies:
    """Follows ``input[:, None].expand(B, K, …)`` through a copy and a view to ``[B·K, …]``, an operand of a product."""

    def __init__(self) -> None:
        self._known: dict[int, _Copy] = {}  # by id

    def source(self, x: Tensor) -> tuple[Tensor, int]:
        """Return the tensor ``[B, …]`` of whose rows a tensor ``[B·K, …]`` has K copies, and K; or itself and 1."""
        known = self._get(x)
        return (x, 1) if known is None or x.ndim > known.source.ndim else (known.source, known.count)

    def _get(self, x: Tensor) -> _Copy | None:
        known = self._known.get(id(x))
        return known if known is not None and known.copy() is x else None

    def copied(self, func: Any, x: Tensor, **kwargs: Any) -> Tensor | None:
        """Copy a tensor that repeats along axis 1, and remember the copy; None for any other."""
        if x.ndim < 3 or x.shape[1] < 2 or x.stride(1) != 0:
            return None
        out: Tensor = func(x, **kwargs)
        self._known[id(out)] = _Copy(weakref.ref(out), x.select(1, 0), x.shape[1])
        return out

    def viewed(self, func: Any, x: Tensor, shape: Any) -> Tensor | None:
        """View a known copy, and remember a view ``[B·K, …]``; None for any other tensor."""
        known = self._get(x)
        if known is None:
            return None
        out: Tensor = func(x, shape)
        if out.shape[1:] == known.source.shape[1:]:
            self._known[id(out)] = replace(known, copy=weakref.ref(out))
        return out
