"""Indices out of range: noted while a program is traced, and kept inside it, where nothing else would check them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from persample._torch import TorchDispatchMode, aten_index_put_impl

_aten = torch.ops.aten
_MASKS = {torch.bool, torch.uint8}


class Bounds(TorchDispatchMode):
    """Lets every operation that looks up or writes at an index note whether the index is out of range.

    Compiled code cannot raise torch's errors: it leaves out lookups whose values nothing needs, and with them their
    checks, and where a check of Inductor's own fails, it ends the process. The index itself is clamped, so that no such
    check fails and nothing is read or written outside of a tensor before the note is looked at.

    Args:
        noted: where 0-d bool tensors are added: where one of them holds, the program's results do not count.
    """

    def __init__(self, noted: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted = noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation with its index in range.

        Args:
            func: an operation of aten.
            types: the subclasses of tensors among the arguments.
            args: its arguments.
            kwargs: its keyword arguments.

        Returns:
            What the operation returns.
        """
        rule = _RULES.get(getattr(func, "overloadpacket", None))
        return func(*(args if rule is None else rule(self.within, *args)), **(kwargs or {}))

    def within(self, index: Tensor, size: int, least: int = 0) -> Tensor:
        """Note whether an index is out of range, and clamp it.

        Args:
            index: integers.
            size: what they must be less than.
            least: what they must not be less than.

        Returns:
            The index, clamped.
        """
        self._noted.append(((index < least) | (index >= size)).any())
        return index.clamp(least, size - 1)


_Within = Callable[..., Tensor]


def _along(within: _Within, table: Tensor, dim: int, index: Tensor, *rest: Any) -> tuple[Any, ...]:
    return table, dim, within(index, _size(table, dim)), *rest


def _along_from_the_end(within: _Within, table: Tensor, dim: int, index: Tensor, *rest: Any) -> tuple[Any, ...]:
    size = _size(table, dim)
    return table, dim, within(index, size, -size), *rest


def _flat(within: _Within, table: Tensor, index: Tensor, *rest: Any) -> tuple[Any, ...]:
    return table, within(index, table.numel(), -table.numel()), *rest


def _axes(within: _Within, table: Tensor, indices: Sequence[Tensor | None], *rest: Any) -> tuple[Any, ...]:
    axis, parts = 0, list[Tensor | None]()
    for index in indices:
        is_mask = index is not None and index.dtype in _MASKS
        if index is None or is_mask:
            parts.append(index)
        else:
            parts.append(within(index, table.shape[axis], -table.shape[axis]))
        axis += index.ndim if index is not None and is_mask else 1
    return table, parts, *rest


def _embedding(within: _Within, table: Tensor, index: Tensor, *rest: Any) -> tuple[Any, ...]:
    return table, within(index, len(table)), *rest


def _embedding_backward(within: _Within, grad: Tensor, index: Tensor, rows: int, *rest: Any) -> tuple[Any, ...]:
    return grad, within(index, rows), rows, *rest


def _classes(within: _Within, logits: Tensor, target: Tensor, *rest: Any) -> tuple[Any, ...]:
    ignored = target == rest[2]
    target = torch.where(ignored, target, within(target.masked_fill(ignored, 0), logits.shape[min(1, logits.ndim - 1)]))
    return logits, target, *rest


def _classes_backward(within: _Within, grad: Tensor, *rest: Any) -> tuple[Any, ...]:
    return grad, *_classes(within, *rest)


def _unpooled(within: _Within, images: Tensor, index: Tensor, size: Sequence[int], *rest: Any) -> tuple[Any, ...]:
    return images, within(index, prod(size)), size, *rest


def _size(table: Tensor, dim: int) -> int:
    return table.shape[dim] if table.ndim else 1


_RULES: dict[Any, Callable[..., tuple[Any, ...]]] = {
    _aten.embedding: _embedding,
    _aten.embedding_dense_backward: _embedding_backward,
    **dict.fromkeys([_aten.nll_loss_forward, _aten.nll_loss2d_forward], _classes),
    **dict.fromkeys([_aten.nll_loss_backward, _aten.nll_loss2d_backward], _classes_backward),
    **dict.fromkeys([_aten.index, _aten.index_put, _aten.index_put_, aten_index_put_impl], _axes),
    **dict.fromkeys([_aten.max_unpool2d, _aten.max_unpool3d], _unpooled),
    **dict.fromkeys([_aten.take, _aten.put, _aten.put_], _flat),
    **dict.fromkeys([_aten.index_fill, _aten.index_fill_], _along_from_the_end),
    **dict.fromkeys([_aten.gather, _aten.index_select], _along),
    **dict.fromkeys([_aten.scatter, _aten.scatter_, _aten.scatter_add, _aten.scatter_add_], _along),
    **dict.fromkeys([_aten.scatter_reduce, _aten.scatter_reduce_], _along),
    **dict.fromkeys([_aten.index_add, _aten.index_add_, _aten.index_copy, _aten.index_copy_], _along),
    **dict.fromkeys([_aten.index_reduce, _aten.index_reduce_], _along),
}
