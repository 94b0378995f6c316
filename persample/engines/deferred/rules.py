"""Rules for operations that return placeholders of new terms; all others compute the placeholders they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from persample._torch import aten_to_copy, schema
from persample.engines.deferred.embedding import EmbeddingTerm
from persample.engines.deferred.placeholder import Placeholder, defer, values_of
from persample.engines.deferred.terms import ComputedTerm, DeferredTerm
from persample.engines.deferred.views import VIEWS

aten = torch.ops.aten


def apply(func: Any, args: Sequence[Any], kwargs: dict[str, Any], call: Callable[..., Any] | None = None) -> Any:
    """Apply an operation to arguments with placeholders among them.

    Args:
        func: an operation of aten.
        args: its arguments.
        kwargs: its keyword arguments.
        call: the function that is called with tensors in the place of placeholders where no rule applies; ``func`` if
            not given.

    Returns:
        The result of the operation, a placeholder where a rule applies.
    """
    rule = _RULES.get(func)
    result = NotImplemented if rule is None else rule(func, *args, **kwargs)
    if result is not NotImplemented:
        return result
    name = str(func.overloadpacket)
    result = (call or func)(*values_of(list(args), name), **values_of(kwargs, name))
    # An operation in place has written into the buffer of the placeholder, which it returns.
    return args[0] if schema(func).is_mutable and isinstance(args[0], Placeholder) else result


def _deferred(
    terms: Sequence[DeferredTerm], like: Placeholder, shape: Sequence[int] | None = None, dtype: Any = None
) -> Placeholder:
    """Return a placeholder of new terms, with the shape and dtype of ``like`` where none are given."""
    shape, dtype = like.shape if shape is None else shape, like.dtype if dtype is None else dtype
    return defer(terms, shape, dtype, like.device, like.buffer.pending)


def _terms(x: Any) -> list[DeferredTerm] | None:
    """Return the terms of a tensor; a tensor that is computed is one term."""
    if isinstance(x, Placeholder):
        return x.terms() if x.buffer.value is None else [ComputedTerm.of(x.value("a sum"))]
    return [ComputedTerm.of(x)]


def _mapped(
    p: Placeholder, change: Callable[[DeferredTerm], DeferredTerm | None], shape: Any = None, dtype: Any = None
) -> Any:
    terms = p.terms()
    changed = [None] if terms is None else [change(term) for term in terms]
    if None in changed:
        return NotImplemented
    return _deferred([term for term in changed if term is not None], p, shape, dtype)


def _cast(func: Any, p: Placeholder, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:  # noqa: ARG001
    dtype = p.dtype if dtype is None else dtype
    is_exact = torch.promote_types(p.dtype, dtype) == dtype
    if not dtype.is_floating_point or not is_exact or kwargs.get("device") not in {None, p.device}:
        return NotImplemented
    return _mapped(p, lambda term: term, dtype=dtype)


def _scale(func: Any, a: Any, b: Any) -> Any:
    p, number = (a, b) if isinstance(a, Placeholder) else (b, a)
    if isinstance(number, Placeholder | complex) or (p is b and func in _DIVISIONS):
        return NotImplemented
    if isinstance(number, Tensor):
        fits = number.is_floating_point() and torch.result_type(p.meta, number) == p.dtype
        if not fits or number.device not in {p.device, torch.device("cpu")} or _broadcast(number, p) != p.shape:
            return NotImplemented
    if func in _DIVISIONS:
        if not isinstance(number, Tensor) and number == 0:
            return NotImplemented
        number = 1 / number
    return _mapped(p, lambda term: term.scale(number))


def _broadcast(x: Tensor, p: Placeholder) -> torch.Size | None:
    try:
        return torch.broadcast_shapes(x.shape, p.shape)
    except RuntimeError:
        return None


def _add(func: Any, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    alike = isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype
    if not alike or a.device != b.device:
        return NotImplemented
    alpha = -alpha if func in {aten.sub.Tensor, aten.sub_.Tensor} else alpha
    first, second = _terms(a), _terms(b)
    if first is None or second is None:
        return NotImplemented
    scaled = [term if alpha == 1 else term.scale(alpha) for term in second]
    if None in scaled:
        return NotImplemented
    return _deferred([*first, *(term for term in scaled if term is not None)], a if isinstance(a, Placeholder) else b)


def _add_in_place(func: Any, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    is_whole = isinstance(a, Placeholder) and not a.views and a.buffer.value is None
    total = _add(func, a, b, alpha=alpha) if is_whole else NotImplemented
    if total is NotImplemented:
        return NotImplemented
    a.buffer.terms = total.buffer.terms  # all views of the buffer change
    a.buffer.pending.add(a.buffer)
    return a


def _zero_row(func: Any, p: Placeholder, number: Any = 0) -> Any:  # noqa: ARG001
    """Zero one row of every sample's table: embeddings do so with the row of their padding index."""
    terms = p.buffer.terms
    tables = p.buffer.value is None and number == 0 and len(p.views) == 2 and bool(terms) and p.numel() > 0
    if not tables or not all(isinstance(term, EmbeddingTerm) for term in terms):
        return NotImplemented
    rows, width = terms[0].num_rows, p.meta.shape[-1]  # type: ignore[attr-defined]
    row, rest = divmod(int(p.meta.storage_offset()), width)
    if rest or row >= rows or tuple(p.meta.stride()) != (rows * width, 1):
        return NotImplemented
    p.buffer.terms = tuple(term.without(row) for term in terms)  # type: ignore[attr-defined]
    return p


def _placed(p: Placeholder, sizes: Sequence[int], dim: int, index: slice) -> Any:
    return _mapped(p, lambda term: term.place(dim, sizes[dim], index), sizes)


def _slice_backward(func: Any, p: Any, sizes: Sequence[int], dim: int, *span: int) -> Any:  # noqa: ARG001
    dim %= len(sizes)
    return _placed(p, sizes, dim, slice(*slice(*span).indices(sizes[dim])))


def _select_backward(func: Any, p: Any, sizes: Sequence[int], dim: int, index: int) -> Any:  # noqa: ARG001
    dim %= len(sizes)
    index %= sizes[dim]
    lifted = apply(aten.unsqueeze.default, (p, dim), {})
    return _placed(lifted, sizes, dim, slice(index, index + 1)) if isinstance(lifted, Placeholder) else NotImplemented


def _cat(func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    if not all(isinstance(x, Placeholder) and x.dtype == tensors[0].dtype and x.ndim for x in tensors):
        return NotImplemented
    if func is aten.stack.default:
        dim %= tensors[0].ndim + 1
        tensors = [apply(aten.unsqueeze.default, (x, dim), {}) for x in tensors]
        if not all(isinstance(x, Placeholder) for x in tensors):
            return NotImplemented
    dim %= tensors[0].ndim
    sizes = list(tensors[0].shape)
    sizes[dim] = sum(x.shape[dim] for x in tensors)
    terms, start = [], 0
    for x in tensors:
        placed = _placed(x, sizes, dim, slice(start, start + x.shape[dim]))
        if placed is NotImplemented:
            return NotImplemented
        terms += placed.buffer.terms
        start += x.shape[dim]
    return _deferred(terms, tensors[0], sizes)


def _matmul(func: Any, a: Any, b: Any) -> Any:  # noqa: ARG001
    matrix = b if isinstance(a, Placeholder) else a
    # Only a matrix that all samples share (the other half of a LoRA pair) leaves the product of signals and inputs.
    if isinstance(matrix, Placeholder) or (matrix.ndim == 3 and matrix.stride(0) != 0):
        return NotImplemented
    matrix = matrix[0] if matrix.ndim == 3 else matrix
    if isinstance(a, Placeholder):
        return _mapped(a, lambda term: term.contract(-1, matrix), (*a.shape[:-1], matrix.shape[1]))
    return _mapped(b, lambda term: term.contract(-2, matrix.T), (*b.shape[:-2], matrix.shape[0], b.shape[-1]))


_DIVISIONS = {aten.div.Tensor, aten.div.Scalar}
_RULES: dict[Any, Callable[..., Any]] = {
    **VIEWS,
    aten.clone.default: _cast,
    aten_to_copy: _cast,
    aten.neg.default: lambda func, p: _scale(func, p, -1),
    **dict.fromkeys([aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar], _scale),
    **dict.fromkeys([aten.add.Tensor, aten.sub.Tensor], _add),
    **dict.fromkeys([aten.add_.Tensor, aten.sub_.Tensor], _add_in_place),
    **dict.fromkeys([aten.fill_.Scalar, aten.zero_.default], _zero_row),
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    **dict.fromkeys([aten.cat.default, aten.stack.default], _cat),
    **dict.fromkeys([aten.mm.default, aten.bmm.default], _matmul),
}
