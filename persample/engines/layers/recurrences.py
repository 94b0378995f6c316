"""Recurrent layers on the sequences of all samples, which report to a callback instead of to their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from persample.vmap_rules.kernel_call import Product
from persample.vmap_rules.recurrent_cells import Cell
from persample.vmap_rules.recurrent_scan import scan_gradients, scan_kernel

# Invoked by a backward pass with the gradients of the biases ``[B, G]``, and of the weights.
Callback = Callable[[Sequence[Tensor], Sequence[Product]], object]


class _ScannedSequences(Function):
    @staticmethod
    def forward(ctx: Any, cell: Cell, callback: Callback, size: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        *given, x, w_ih, w_hh = tensors
        state, biases = given[:size], given[size:]
        one_each = [w.expand(len(x), *w.shape) for w in (*biases, w_ih, w_hh)]
        out = scan_kernel(cell, size, *state, *one_each[:-2], x, *one_each[-2:])
        ctx.save_for_backward(x, w_ih, w_hh, *out[size:])
        ctx.cell, ctx.callback, ctx.size = cell, callback, size
        ctx.set_materialize_grads(False)
        return out[:size]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, w_ih, w_hh, *kept = (y.detach() for y in ctx.saved_tensors)
        weights = [w.expand(len(x), *w.shape) for w in (w_ih, w_hh)]
        needed = ctx.needs_input_grad[3:]
        *given, of_x, of_ih, of_hh = scan_gradients(ctx.cell, ctx.size, needed, *grads, x, *weights, *kept)
        of_state, of_biases = given[: ctx.size], given[ctx.size :]
        ctx.callback(of_biases, [of_ih, of_hh])
        return None, None, None, *of_state, *(None for _ in of_biases), of_x, None, None


# (cell, callback, size of the state, *state [B, 1, N, H], *biases [G], x [B, T, N, I], W, W') → outputs of all steps,
# and the rest of the last state. Passes no gradient to weights and biases, so that a gradient there comes from another
# use of them.
scanned_sequences: Callable[..., tuple[Tensor, ...]] = _ScannedSequences.apply
