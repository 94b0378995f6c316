"""Which operations of a backward pass are left undone: those that multiply signals with inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from persample._torch import aten_efficientzerotensor
from persample.engines.deferred.correlations import Correlations
from persample.engines.deferred.lookups import Lookups, SharedLookups
from persample.engines.deferred.numbering import Numbering
from persample.engines.deferred.placeholder import Placeholder, values_of
from persample.engines.deferred.product import Product
from persample.engines.deferred.terms import DeferredTerm

aten = torch.ops.aten


class Maker(Protocol):
    """What a creator asks of the mode."""

    numbering: Numbering

    def keeps(self, steps: int, written: int, *operands: Tensor) -> bool:
        """Return whether a product of operands is better left undone."""

    def make(self, terms: tuple[DeferredTerm, ...], shape: Any, dtype: torch.dtype, device: Any) -> Placeholder:
        """Return the placeholder of some terms."""


def _made(mode: Maker, term: DeferredTerm, like: Tensor) -> Placeholder:
    return mode.make((term,), term.shape, like.dtype, like.device)


def _bmm(mode: Maker, left: Tensor, right: Tensor) -> Placeholder | None:
    if not mode.keeps(left.shape[2], left.shape[0] * left.shape[1] * right.shape[2], left, right):
        return None
    return _made(mode, Product.of(left.unsqueeze(2), right.mT.unsqueeze(1)), left)


def _mm(mode: Maker, left: Tensor, right: Tensor) -> Placeholder | None:
    """Defer the signals of all samples times an input that they share."""
    if not mode.keeps(left.shape[1], left.shape[0] * right.shape[1], left, right):
        return None
    return _made(mode, Product.of(left.unsqueeze(1), right.T.unsqueeze(0)), left)


def _mul(mode: Maker, left: Tensor, right: Any) -> Placeholder | None:
    """Defer a product of two tensors each of which repeats along some axis of the other."""
    if not isinstance(right, Tensor) or left.shape == right.shape:
        return None
    ndim = max(left.ndim, right.ndim)
    left, right = (x.reshape(*[1] * (ndim - x.ndim), *x.shape) if x.ndim < ndim else x for x in (left, right))
    pairs = list(zip(left.shape, right.shape, strict=True))
    if not any(a > 1 and b == 1 for a, b in pairs) or not any(b > 1 and a == 1 for a, b in pairs):
        return None
    written = prod(max(pair) for pair in pairs)
    if written <= left.numel() + right.numel() or not mode.keeps(1, written, left, right):
        return None  # a product as small as this is rarely that of a signal and an input
    return _made(mode, Product.of(left.unsqueeze(-1), right.unsqueeze(-1)), left)


def _convolution(
    mode: Maker, grad: Tensor, images: Tensor, kernel: Tensor, _bias: Any, *settings: Any
) -> tuple[None, Placeholder, None] | None:
    stride, padding, dilation, transposed, _, groups, wanted = settings
    # As if with T = 1: one too small to be kept is put off too, for ``Conv`` writes it out with one copy less.
    if list(wanted) != [False, True, False] or not mode.keeps(1, kernel.numel(), grad, images):
        return None
    axes = kernel.ndim - 2  # a list of one number, of padding="valid" say, speaks of all of them
    stride, padding, dilation = (tuple(x) * axes if len(x) == 1 else tuple(x) for x in (stride, padding, dilation))
    signals, inputs = (images, grad) if transposed else (grad, images)
    term = Correlations(signals, inputs, tuple(kernel.shape), (stride, padding, dilation), groups, tuple(kernel.shape))
    if not term.is_regular:
        return None
    return None, _made(mode, term, grad), None


def _embedding(  # noqa: PLR0917 (as torch's)
    mode: Maker, grad: Tensor, index: Tensor, tables: int, padding: int, by_frequency: bool
) -> Placeholder | None:
    """Defer the gradient of one table after the other, as vmap numbers their rows."""
    if padding >= 0 or not mode.keeps(2, tables * grad.shape[-1], grad):
        return None
    shape = (tables, grad.shape[-1])
    samples, rows = mode.numbering.samples(index, index=True)
    if not samples and index.ndim == 1 and not by_frequency:  # samples that share their index are more columns
        return _made(mode, SharedLookups(grad, index, shape), grad)
    if samples * rows != tables:
        return None
    signals = grad.reshape(samples, -1, grad.shape[-1])
    if by_frequency:
        ones = torch.ones_like(index, dtype=grad.dtype).flatten()
        counts = ones.new_zeros(tables).index_add_(0, index.flatten(), ones)
        signals = signals / counts[index].view(samples, -1, 1)
    return _made(mode, Lookups(signals, index.reshape(samples, -1) % rows, rows, shape), grad)


def index_put(mode: Maker, zeros: Any, index: Any, values: Any, accumulate: bool = False) -> Placeholder | None:
    """Defer the gradient of ``table[index]``: values added to zeros at (sample, row).

    Args:
        mode: the mode.
        zeros: what is added to.
        index: the places.
        values: what is added.
        accumulate: whether it is added.
    """
    known = isinstance(zeros, Placeholder) and zeros.terms() == [] and zeros.ndim > 1
    if not known or not accumulate or len(index) != 2 or None in index or index[1].dtype == torch.bool:
        return None
    samples, step = mode.numbering.samples(index[0], index=False)
    if samples != zeros.shape[0] or step != 1:
        return None
    places = index[1].expand(torch.broadcast_shapes(index[0].shape, index[1].shape)).reshape(samples, -1)
    values = values_of(values, "aten.index_put")
    signals = values.reshape(samples, places.shape[1], -1)
    term = Lookups(signals, places % zeros.shape[1], zeros.shape[1], tuple(zeros.shape))
    return _made(mode, term, values)


def _zeros_like(mode: Maker, like: Tensor, shape: Any = None, **kwargs: Any) -> Placeholder | None:
    given = {name: x for name, x in kwargs.items() if x is not None}
    return _zeros(mode, like.shape if shape is None else shape, **{"dtype": like.dtype, "device": like.device, **given})


def _zeros(
    mode: Maker, shape: Any, *, dtype: torch.dtype | None = None, device: Any = None, layout: Any = None, **_: Any
) -> Placeholder | None:
    """Defer zeros, which gradients are often added to, or which stand for no gradient at all."""
    if dtype is None or not dtype.is_floating_point or device is None or layout not in {None, torch.strided}:
        return None
    return mode.make((), shape, dtype, torch.device(device))


def _arange(mode: Maker, *bounds: int, **kwargs: Any) -> Tensor:
    return mode.numbering.arange(*bounds, **kwargs)


def _follow(func: Any, mode: Maker, *args: Any, **kwargs: Any) -> Tensor | None:
    return mode.numbering.follow(func, *args, **kwargs)


PRODUCERS: dict[Any, Callable[..., Any]] = {
    aten.bmm.default: _bmm,
    aten.mm.default: _mm,
    aten.mul.Tensor: _mul,
    aten.convolution_backward.default: _convolution,
    aten.embedding_dense_backward.default: _embedding,
    aten.new_zeros.default: _zeros_like,
    aten.zeros_like.default: _zeros_like,
    **dict.fromkeys([aten.zeros.default, aten_efficientzerotensor], _zeros),
    **dict.fromkeys([aten.arange.default, aten.arange.start, aten.arange.start_step], _arange),
    **{
        func: functools.partial(_follow, func)
        for func in (aten.view.default, aten.unsqueeze.default, aten.expand.default, aten.add.Tensor)
    },
}
