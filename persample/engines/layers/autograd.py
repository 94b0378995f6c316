"""Linear layers and lookups on rows, whose backward passes report to a callback what the weight's gradient is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from persample.cpu import gemm

Callback = Callable[[Tensor, Tensor], object]  # called with (output gradients, inputs)


class LinearRows(Function):
    """``F.linear`` on rows: reports (output gradients, inputs), and has no gradient of its weight and bias."""

    apply: Callable[..., Tensor]

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, callback: Callback | None) -> Tensor:
        """Compute the layer.

        Args:
            ctx: autograd's context.
            rows: ``[n, i]``.
            weight: ``[o, i]``.
            bias: ``[o]``, or none.
            callback: called in the backward pass, or none: no parameter is differentiated.

        Returns:
            ``[n, o]``.
        """
        ctx.save_for_backward(None if callback is None else rows, weight)
        ctx.callback = callback
        return gemm.linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, signals: Tensor) -> tuple[Tensor | None, None, None, None]:
        """Report the output gradients, and return those of the rows.

        Args:
            ctx: autograd's context.
            signals: the output gradients, ``[n, o]``.

        Returns:
            A gradient per argument of ``forward``.
        """
        rows, weight = ctx.saved_tensors
        if ctx.callback is not None:
            ctx.callback(signals, rows.detach())
        return gemm.mm(signals, weight.detach()) if ctx.needs_input_grad[0] else None, None, None, None


class LookupRows(Function):
    """``F.embedding``: reports (output gradients, indices), and has no gradient of its table."""

    apply: Callable[..., Tensor]

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor, callback: Callback) -> Tensor:
        """Look rows up.

        Args:
            ctx: autograd's context.
            table: ``[V, d]``.
            index: integers, ``[...]``.
            callback: called in the backward pass.

        Returns:
            ``[..., d]``.
        """
        ctx.save_for_backward(index)
        ctx.callback = callback
        return F.embedding(index, table)

    @staticmethod
    def backward(ctx: Any, signals: Tensor) -> tuple[None, None, None]:
        """Report the output gradients.

        Args:
            ctx: autograd's context.
            signals: the output gradients, ``[..., d]``.

        Returns:
            No gradient for any argument of ``forward``.
        """
        ctx.callback(signals, *ctx.saved_tensors)
        return None, None, None
