"""Views of placeholders: the same deferred buffer through one more view operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from persample._torch import aten_reshape_alias, aten_unsafe_view
from persample.engines.deferred.placeholder import Placeholder, View
from persample.engines.deferred.terms import DeferredTerm

aten = torch.ops.aten


Change = Callable[[DeferredTerm, Tensor], DeferredTerm | None]  # of a term, by a view whose meta tensor is given


def _view(func: Any, p: Placeholder, *args: Any, change: Change, **kwargs: Any) -> Any:
    if p.buffer.value is not None:
        return func(p.value("a view"), *args, **kwargs)
    meta = func(p.meta, *args, **kwargs)
    if meta.shape == p.meta.shape and meta.stride() == p.meta.stride() and func not in _REORDERS:
        return Placeholder(p.buffer, p.meta, p.views)
    view = View(lambda term: change(term, meta), lambda x: func(x, *args, **kwargs))
    return Placeholder(p.buffer, meta, (*p.views, view))


def _reshape(func: Any, p: Placeholder, *args: Any, **kwargs: Any) -> Any:
    def change(term: DeferredTerm, meta: Tensor) -> DeferredTerm | None:
        is_expanded = meta.numel() != p.meta.numel()
        return None if is_expanded else term.reshape(meta.shape)

    return _view(func, p, *args, change=change, **kwargs)


def _permute(func: Any, p: Placeholder, *args: Any) -> Any:
    dims = list(range(p.ndim))
    if func is aten.permute.default:
        dims = [dim % p.ndim for dim in args[0]]
    elif p.ndim > 1:
        one, other = (args[0] % p.ndim, args[1] % p.ndim) if args else (0, 1)
        dims[one], dims[other] = dims[other], dims[one]
    return _view(func, p, *args, change=lambda term, _: term.permute(dims))


def _select(func: Any, p: Placeholder, dim: int, index: int) -> Any:
    dim, index = dim % p.ndim, index % p.shape[dim]

    def change(term: DeferredTerm, meta: Tensor) -> DeferredTerm | None:
        picked = term.pick(dim, slice(index, index + 1))
        return None if picked is None else picked.reshape(meta.shape)

    return _view(func, p, dim, index, change=change)


def _slice(  # noqa: PLR0917 (as torch's)
    func: Any, p: Placeholder, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    span = slice(*slice(start, end, step).indices(p.shape[dim]))
    return _view(func, p, dim, start, end, step, change=lambda term, _: term.pick(dim % p.ndim, span))


_REORDERS = {aten.permute.default, aten.transpose.int, aten.t.default, aten.select.int, aten.slice.Tensor}
VIEWS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys([aten.view.default, aten_unsafe_view, aten_reshape_alias, aten.expand.default], _reshape),
    **dict.fromkeys([aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims], _reshape),
    **dict.fromkeys([aten.alias.default, aten.detach.default], _reshape),
    **dict.fromkeys([aten.permute.default, aten.transpose.int, aten.t.default], _permute),
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
}
