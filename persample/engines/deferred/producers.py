"""Producers: the operations of a backward pass that multiply signals with inputs, and the placeholders they return."""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from persample._torch import aten_efficientzerotensor, aten_unsafe_view
from persample.engines.deferred.context import DeferralContext
from persample.engines.deferred.conv import ConvTerm
from persample.engines.deferred.embedding import EmbeddingTerm, OutputsEmbeddingTerm, SharedEmbeddingTerm
from persample.engines.deferred.placeholder import Placeholder, defer, values_of
from persample.engines.deferred.product import ProductTerm
from persample.factors import contractions

aten = torch.ops.aten


def _bmm(context: DeferralContext, left: Tensor, right: Tensor) -> Tensor | None:
    source, count = context.copies.source(right)
    if not context.defers(left.shape[2], left.shape[0] * left.shape[1] * right.shape[2], left, source):
        return contractions.sum_of_products(left.mT, right) if contractions.has_few_columns(left.mT, right) else None
    if count == 1:
        return context.placeholder(ProductTerm.of(left.unsqueeze(2), right.mT.unsqueeze(1)), left)
    split = left.unflatten(0, (len(source), count))
    term = ProductTerm.of(split.unsqueeze(3), source.mT.unsqueeze(1).unsqueeze(1))
    return context.placeholder(term.reshape((len(left), left.shape[1], right.shape[2])), left)


def _mm(context: DeferralContext, left: Tensor, right: Tensor) -> Placeholder | None:
    """Defer the product of the signals of all samples and an input that the samples share."""
    if not context.defers(left.shape[1], left.shape[0] * right.shape[1], left, right):
        return None
    return context.placeholder(ProductTerm.of(left.unsqueeze(1), right.T.unsqueeze(0)), left)


def _mul(context: DeferralContext, left: Tensor, right: Any) -> Placeholder | None:
    """Defer a broadcast product in which either operand repeats along some axis of the other."""
    if not isinstance(right, Tensor) or left.shape == right.shape:
        return None
    ndim = max(left.ndim, right.ndim)
    left, right = (x.reshape(*[1] * (ndim - x.ndim), *x.shape) if x.ndim < ndim else x for x in (left, right))
    pairs = list(zip(left.shape, right.shape, strict=True))
    if not any(a > 1 and b == 1 for a, b in pairs) or not any(b > 1 and a == 1 for a, b in pairs):
        return None
    written = prod(max(pair) for pair in pairs)
    if written <= left.numel() + right.numel() or not context.defers(1, written, left, right):
        return None  # so small a product is rarely one of a signal and an input
    return context.placeholder(ProductTerm.of(left.unsqueeze(-1), right.unsqueeze(-1)), left)


def _convolution(
    context: DeferralContext, grad: Tensor, images: Tensor, kernel: Tensor, _bias: Any, *settings: Any
) -> tuple[None, Placeholder, None] | None:
    stride, padding, dilation, transposed, _, groups, wanted = settings
    # T = 1 defers small kernels, too: ``Conv`` writes them out with one copy less than the operation.
    if list(wanted) != [False, True, False] or not context.defers(1, kernel.numel(), grad, images):
        return None
    axes = kernel.ndim - 2  # a list of one number (padding="valid") holds for all axes
    stride, padding, dilation = (tuple(x) * axes if len(x) == 1 else tuple(x) for x in (stride, padding, dilation))
    signals, inputs = (images, grad) if transposed else (grad, images)
    shape = tuple(kernel.shape)
    term = ConvTerm(shape, signals, inputs, shape, (stride, padding, dilation), groups)
    if not term.is_regular:
        return None
    return None, context.placeholder(term, grad), None


def _embedding(  # noqa: PLR0917 (as torch's)
    context: DeferralContext, grad: Tensor, index: Tensor, tables: int, padding: int, by_frequency: bool
) -> Placeholder | None:
    """Defer the gradient of the tables of all samples, which vmap looks up as one table."""
    if padding >= 0 or not context.defers(2, tables * grad.shape[-1], grad, is_product=False):
        return None
    shape = (tables, grad.shape[-1])
    samples, rows = context.offsets.sizes(index, index_added=True)
    if not samples and index.ndim == 1 and not by_frequency:  # samples that share an index stand side by side
        return context.placeholder(SharedEmbeddingTerm(shape, grad, index), grad)
    if samples * rows != tables:
        return None
    signals = grad.reshape(samples, -1, grad.shape[-1])
    if by_frequency:
        ones = torch.ones_like(index, dtype=grad.dtype).flatten()
        counts = ones.new_zeros(tables).index_add_(0, index.flatten(), ones)
        signals = signals / counts[index].view(samples, -1, 1)
    return context.placeholder(EmbeddingTerm(shape, signals, index.reshape(samples, -1) % rows, rows), grad)


def index_put(
    context: DeferralContext, zeros: Any, index: Any, values: Any, accumulate: bool = False
) -> Placeholder | None:
    """Defer the gradient of ``table[index]``: values added to zeros at (sample, row).

    Args:
        context: the state of the backward pass.
        zeros: the tensor that the values are added to.
        index: the places of the values.
        values: the values.
        accumulate: whether equal places add up.
    """
    is_zero = isinstance(zeros, Placeholder) and zeros.terms() == [] and zeros.ndim > 1
    axis = len(index) - 1  # of the rows: 1, or 2 after that of K outputs
    known = axis in {1, 2} and [place for place, x in enumerate(index) if x is None] == list(range(1, axis))
    if not is_zero or not accumulate or not known or index[axis].dtype == torch.bool:
        return None
    samples, step = context.offsets.sizes(index[0], index_added=False)
    if samples != zeros.shape[0] or step != 1:
        return None
    places = index[axis].expand(torch.broadcast_shapes(index[0].shape, index[axis].shape)).reshape(samples, -1)
    values = values_of(values, "aten.index_put")
    signals = values.reshape(samples, places.shape[1], -1)
    kind, rows = (EmbeddingTerm, OutputsEmbeddingTerm)[axis - 1], zeros.shape[axis]
    return context.placeholder(kind(tuple(zeros.shape), signals, places % rows, rows), values)


def _zeros_like(context: DeferralContext, like: Tensor, shape: Any = None, **options: Any) -> Placeholder | None:
    given = {name: x for name, x in options.items() if x is not None}
    options = {"dtype": like.dtype, "device": like.device, **given}
    return _zeros(context, like.shape if shape is None else shape, **options)


def _zeros(context: DeferralContext, shape: Any, **options: Any) -> Placeholder | None:
    """Defer zeros: gradients are added to them, or they are the gradient of a parameter without influence."""
    dtype, device = options.get("dtype"), options.get("device")
    if dtype is None or not dtype.is_floating_point or device is None:
        return None
    is_strided = options.get("layout") in {None, torch.strided}
    return defer((), shape, dtype, torch.device(device), context.pending) if is_strided else None


def _follow(func: Any, context: DeferralContext, *args: Any, **kwargs: Any) -> Tensor | None:
    return context.offsets.follow(func, *args, **kwargs)


def _view(func: Any, context: DeferralContext, x: Tensor, shape: Any) -> Tensor | None:
    viewed = context.copies.viewed(func, x, shape)
    return context.offsets.follow(func, x, shape) if viewed is None else viewed


PRODUCERS: dict[Any, Callable[..., Any]] = {
    aten.bmm.default: _bmm,
    aten.mm.default: _mm,
    aten.mul.Tensor: _mul,
    aten.convolution_backward.default: _convolution,
    aten.embedding_dense_backward.default: _embedding,
    aten.new_zeros.default: _zeros_like,
    aten.zeros_like.default: _zeros_like,
    **dict.fromkeys([aten.zeros.default, aten_efficientzerotensor], _zeros),
    **dict.fromkeys(
        [aten.arange.default, aten.arange.start, aten.arange.start_step],
        lambda context, *bounds, **kwargs: context.offsets.arange(*bounds, **kwargs),
    ),
    **{
        func: functools.partial(_follow, func)
        for func in (aten.unsqueeze.default, aten.expand.default, aten.add.Tensor)
    },
    **{func: functools.partial(_view, func) for func in (aten.view.default, aten_unsafe_view)},
    aten.clone.default: lambda context, x, **kwargs: context.copies.copied(aten.clone.default, x, **kwargs),
}
