"""Recurrent layers on the sequences of all samples, which pass the signals of their gates to tensors without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function

from persample.vmap_rules.recurrent import scan_kernel, scan_signals
from persample.vmap_rules.recurrent_steps import Cell


class _ScannedSequences(Function):
    @staticmethod
    def forward(ctx: Any, cell: Cell, size: int, _at_inputs: Tensor, _at_state: Tensor, *tensors: Tensor) -> Any:
        *given, x, w_ih, w_hh = tensors
        state, biases = given[:size], given[size:]
        one_each = [w.expand(len(x), *w.shape) for w in (*biases, w_ih, w_hh)]
        out = scan_kernel(cell, size, *state, *one_each[:-2], x, *one_each[-2:])
        ctx.save_for_backward(w_ih, w_hh, *out[size:])
        ctx.cell, ctx.size, ctx.num_biases = cell, size, len(biases)
        ctx.mark_non_differentiable(out[size])
        ctx.set_materialize_grads(False)
        return out[: size + 1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        w_ih, w_hh, *kept = (y.detach() for y in ctx.saved_tensors)
        w_ih, w_hh = (w.expand(len(kept[0]), *w.shape) for w in (w_ih, w_hh))
        needs_x = ctx.needs_input_grad[-3]
        of_state, of_x, signals = scan_signals(ctx.cell, grads[: ctx.size], w_ih, w_hh, kept, needs_x=needs_x)
        return None, None, *signals, *of_state, *[None] * ctx.num_biases, of_x, None, None


# (cell, size of the state, two tensors [B, T, N, G] whose gradients are the signals at the gates of x and of the
# state, *state [B, 1, N, H], *biases [G], x [B, T, N, I], W, W') → outputs of all steps, the rest of the last state,
# and the state before each step. Weights and biases get no gradient here, so that one there comes from another use.
scanned_sequences: Callable[..., tuple[Tensor, ...]] = _ScannedSequences.apply
