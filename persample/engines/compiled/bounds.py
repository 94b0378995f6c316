"""Operations that a trace replaces.

Each index is clamped, and a flag records whether it was out of range; constants that torch itself makes get values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from persample._torch import FakeTensor, OpOverload, TorchDispatchMode, aten_efficientzerotensor, schema
from persample.utils.tracing import untraced
from persample.utils.trees import Leaf, Tree

_aten = torch.ops.aten
_MASKS = {torch.bool, torch.uint8}


@functools.cache
def _returns_a_number(func: object) -> bool:
    """Return whether an operation returns a number of Python, as what ``Tensor.item`` calls does."""
    returns = schema(func).returns if isinstance(func, OpOverload) else ()
    return [str(x.type) for x in returns] == ["number"]


class Bounds(TorchDispatchMode):
    """Records, for every operation that reads or writes at an index, whether the index is out of range.

    Compiled code cannot raise torch's errors: Inductor removes lookups whose values are unused, together with their
    checks, and a failed check of Inductor's own ends the process. So each index is clamped if ``clamps``: no check
    fails, and no memory outside of a tensor is read or written before the flag is read. Flags, 0-d bool, are appended
    to ``noted``: if one is true, the program's results are invalid.

    The values of real tensors are read, and torch's zero tensors, which have no memory, become ordinary zeros:
    operations on zero tensors return broken fake tensors, or end the process.
    """

    supports_higher_order_operators = True

    def __init__(self, noted: list[Tensor], *, clamps: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted, self._clamps = noted, clamps

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: Tree = (), kwargs: Tree = None
    ) -> Tree:
        """Call an operation with its index in range, or read a value."""
        if _returns_a_number(func) and not isinstance(args[0], FakeTensor):
            with untraced():
                return args[0].item()
        if func is aten_efficientzerotensor:
            func = _aten.zeros.default
        rule = _RULES.get(getattr(func, "overloadpacket", None)) if self._clamps else None
        return func(*(args if rule is None else rule(self.within, *args)), **(kwargs or {}))

    def within(self, index: Tensor, size: int, least: int = 0) -> Tensor:
        """Record whether an index is outside of [least, size), and return it clamped."""
        once = index[tuple(slice(None if stride else 1) for stride in index.stride())]  # of an expanded one
        self._noted.append(((once < least) | (once >= size)).any())
        return once.clamp(least, size - 1).expand_as(index)


def reads_an_index(operation: object) -> bool:
    """Return whether an operation reads or writes at an index, which may be out of range."""
    return getattr(operation, "overloadpacket", None) in _RULES


_Within = Callable[..., Tensor]
_Args = tuple[Leaf, ...]


def _at(place: int, size: Callable[..., int], within: _Within, *args: Leaf, from_the_end: bool = False) -> _Args:
    """Return the arguments with the index at one place in range; ``size`` is a function of all of them."""
    count = size(*args)
    return *args[:place], within(args[place], count, -count if from_the_end else 0), *args[place + 1 :]


def _along(table: Tensor, dim: int, *_: object) -> int:
    return table.shape[dim] if table.ndim else 1


def _axes(within: _Within, table: Tensor, indices: Sequence[Tensor | None], *rest: object) -> _Args:
    axis, parts = 0, list[Tensor | None]()
    for index in indices:
        is_mask = index is not None and index.dtype in _MASKS
        if index is None or is_mask:
            parts.append(index)
        else:
            parts.append(within(index, table.shape[axis], -table.shape[axis]))
        axis += index.ndim if index is not None and is_mask else 1
    return table, parts, *rest


def _classes(first: int, within: _Within, *args: Leaf) -> _Args:
    """Return the arguments with the classes in range; the first places are those of gradients."""
    logits, target, _, _, ignored = args[first : first + 5]
    is_ignored = target == ignored
    classes = within(target.masked_fill(is_ignored, 0), logits.shape[min(1, logits.ndim - 1)])
    return *args[: first + 1], torch.where(is_ignored, target, classes), *args[first + 2 :]


_RULES: dict[object, Callable[..., _Args]] = {
    _aten.embedding: partial(_at, 1, lambda table, *_: len(table)),
    _aten.embedding_dense_backward: partial(_at, 1, lambda _grad, _index, rows, *_: rows),
    **dict.fromkeys([_aten.nll_loss_forward, _aten.nll_loss2d_forward], partial(_classes, 0)),
    **dict.fromkeys([_aten.nll_loss_backward, _aten.nll_loss2d_backward], partial(_classes, 1)),
    **dict.fromkeys([_aten.index, _aten.index_put, _aten.index_put_], _axes),
    **dict.fromkeys([_aten.max_unpool2d, _aten.max_unpool3d], partial(_at, 1, lambda _x, _index, size, *_: prod(size))),
    **dict.fromkeys([_aten.take, _aten.put, _aten.put_], partial(_at, 1, lambda x, *_: x.numel(), from_the_end=True)),
    **dict.fromkeys([_aten.index_fill, _aten.index_fill_], partial(_at, 2, _along, from_the_end=True)),
    **dict.fromkeys([_aten.gather, _aten.index_select], partial(_at, 2, _along)),
    **dict.fromkeys([_aten.scatter, _aten.scatter_, _aten.scatter_add, _aten.scatter_add_], partial(_at, 2, _along)),
    **dict.fromkeys([_aten.scatter_reduce, _aten.scatter_reduce_], partial(_at, 2, _along)),
    **dict.fromkeys([_aten.index_add, _aten.index_add_, _aten.index_copy, _aten.index_copy_], partial(_at, 2, _along)),
    **dict.fromkeys([_aten.index_reduce, _aten.index_reduce_], partial(_at, 2, _along)),
}
