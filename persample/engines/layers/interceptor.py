"""Layers under vmap that are computed on the rows of all samples, and hand over their inputs and signals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from persample._torch import (
    add_batch_dim,
    get_unwrapped,
    is_batchedtensor,
    maybe_get_bdim,
    maybe_get_level,
    temporarily_clear_interpreter_stack,
)
from persample.utils.dtypes import is_autocast
from persample.utils.tracing import is_wrapped
from persample.vmap_rules.functional import linear


class LayerParams(NamedTuple):
    """A linear layer's parameters.

    Args:
        weight: the place of its matrix among all parameters, or None: it is frozen.
        bias: that of its bias, or None.
        of_vectors: whether its input is one vector per sample.
    """

    weight: int | None
    bias: int | None
    of_vectors: bool


class LayerRecorder(Protocol):
    """What is told of layers, and returns what takes their signals and inputs, a row each, in the backward pass."""

    def layer(self, use: LayerParams) -> Callable[[Tensor, Tensor], object]:
        """Expect those of a linear layer."""

    def table(self, place: int, padding: int | None) -> Callable[[Tensor, Tensor], object]:
        """Expect those of lookups in the table at a place among the parameters: inputs are rows, one of no gradient."""


class LayerInterceptor:
    """Stands for ``F.linear`` and ``F.embedding`` under one vmap over plain autograd, and catches uses of parameters.

    What it catches leaves no gradient at the parameters: only other uses do.

    Args:
        params: the parameters, plain tensors.
        given: the same, as the loss is given them: some batched, each sample with its own.
        level: of the vmap.
        size: B.
        taker: told of every layer.

    Examples:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from torch.func import vmap
        >>> w, x = torch.ones(1, 2, requires_grad=True), torch.tensor([[3.0, 4.0]])
        >>> def loss(x):
        ...     return LayerInterceptor([w], [w], 1, 1, SimpleNamespace(layer=lambda use: print))(x, w)[0] ** 2
        >>> torch.autograd.grad(vmap(loss)(x).sum(), w, allow_unused=True)
        tensor([[14.]]) tensor([[3., 4.]])
        (None,)
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        given: Sequence[Tensor],
        level: int,
        size: int,
        taker: LayerRecorder,
    ) -> None:
        self._level, self._size = level, size
        self._params = params
        self._taker = taker
        self._places = {id(x): place for place, x in enumerate(given)}

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        """Compute a linear layer.

        Args:
            input: as in torch.
            weight: as in torch.
            bias: as in torch.

        Returns:
            As in torch.
        """
        out = self._of_rows(input, weight, bias)
        return linear(input, weight, bias) if out is None else out

    def embedding(  # noqa: PLR0917 - as torch's
        self,
        input: Tensor,  # noqa: A002
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        """Look rows up in a table.

        Args:
            input: as in torch.
            weight: as in torch.
            padding_idx: as in torch.
            max_norm: as in torch.
            norm_type: as in torch.
            scale_grad_by_freq: as in torch.
            sparse: as in torch.

        Returns:
            As in torch.
        """
        place = self._places.get(id(weight))
        options = max_norm is not None or scale_grad_by_freq or sparse
        fits = weight.ndim == 2 and (padding_idx is None or -len(weight) <= padding_idx < len(weight))
        plain = not is_wrapped(weight) and (self._is_of_rows(input) or not is_wrapped(input))
        if place is None or options or not fits or not plain or not input.numel():
            return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        index = _in_front(input) if is_wrapped(input) else input.expand(self._size, *input.shape)
        take = self._taker.table(place, None if padding_idx is None else padding_idx % len(weight))
        with temporarily_clear_interpreter_stack():
            out = _Lookup.apply(weight, index, take)
        return add_batch_dim(out, 0, self._level)

    def _of_rows(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:  # noqa: A002
        place, bias_place = self._places.get(id(weight)), self._places.get(id(bias))
        # One that requires grad stays itself, so that the layer is differentiated, frozen weight or not.
        added = bias if bias_place is None or bias is None or not is_wrapped(bias) else self._params[bias_place]
        known = place is not None or (not weight.requires_grad and added is bias)
        known &= bias_place is not None or bias is None or not bias.requires_grad
        if not known or not self._is_of_rows(input) or not _fits(input, weight, added) or is_autocast(input.device):
            return None
        rows = _in_front(input)
        take = (
            None if place is bias_place is None else self._taker.layer(LayerParams(place, bias_place, input.ndim == 1))
        )
        with temporarily_clear_interpreter_stack():
            # The shape is made outside of the function: what it returned as a view could not be written in place.
            out = _Linear.apply(rows.flatten(0, -2), weight, added, take)
            out = out.view(*rows.shape[:-1], weight.shape[0]) if rows.ndim > 2 else out
        return add_batch_dim(out, 0, self._level)

    def _is_of_rows(self, x: Tensor) -> bool:
        own = is_batchedtensor(x) and maybe_get_level(x) == self._level
        return own and not is_wrapped(get_unwrapped(x))


def _in_front(x: Tensor) -> Tensor:
    plain, axis = get_unwrapped(x), maybe_get_bdim(x)
    return plain.movedim(axis, 0) if axis else plain


def _fits(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:  # noqa: A002
    if weight.ndim != 2 or input.dtype != weight.dtype or not input.numel() or input.shape[-1:] != weight.shape[1:]:
        return False
    if bias is not None and (bias.dtype != weight.dtype or bias.shape != weight.shape[:1]):
        return False
    return not any(is_wrapped(x) for x in (weight, bias) if x is not None)


class _Linear(Function):
    """A linear layer that hands its inputs and signals over, and has no gradient of its weight and bias."""

    apply: Callable[..., Tensor]

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, take: Any) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.take = take
        return F.linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, signals: Tensor) -> tuple[Tensor | None, None, None, None]:
        rows, weight = ctx.saved_tensors
        if ctx.take is not None:
            ctx.take(signals, rows.detach())
        return torch.mm(signals, weight.detach()) if ctx.needs_input_grad[0] else None, None, None, None


class _Lookup(Function):
    """Rows of a table, whose signals are handed over."""

    apply: Callable[..., Tensor]

    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor, take: Any) -> Tensor:
        ctx.save_for_backward(index)
        ctx.take = take
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, signals: Tensor) -> tuple[None, None, None]:
        ctx.take(signals, *ctx.saved_tensors)
        return None, None, None
