"""Linear layers and lookups on the rows of all samples, which report to a callback instead of to their weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

Callback = Callable[[Tensor, Tensor], object]  # invoked by a backward pass with (output gradients, inputs)


class _LinearRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, callback: Callback | None) -> Tensor:
        ctx.save_for_backward(None if callback is None else rows, weight)
        ctx.callback = callback
        return F.linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, signals: Tensor) -> tuple[Tensor | None, None, None, None]:
        rows, weight = ctx.saved_tensors
        if ctx.callback is not None:
            ctx.callback(signals, rows.detach())
        return torch.mm(signals, weight.detach()) if ctx.needs_input_grad[0] else None, None, None, None


class _LookupRows(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor, callback: Callback) -> Tensor:
        ctx.save_for_backward(index)
        ctx.callback = callback
        return F.embedding(index, table)

    @staticmethod
    def backward(ctx: Any, signals: Tensor) -> tuple[None, None, None]:
        ctx.callback(signals, *ctx.saved_tensors)
        return None, None, None


# Both pass no gradient to the weight (or table) and bias, so that a gradient there comes from another use of them.
linear_rows: Callable[..., Tensor] = _LinearRows.apply
lookup_rows: Callable[..., Tensor] = _LookupRows.apply
