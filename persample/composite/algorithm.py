"""Gradient caching: encode without a graph, differentiate the loss of z, and back-propagate dL/dz chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from persample import inputs
from persample.composite import first_pass, second_pass
from persample.composite.buffers import BufferRecorder
from persample.composite.chunk_engine import encode_with_graph
from persample.composite.encoder import Encoder
from persample.composite.loss_head import LossHead
from persample.errors import LossError
from persample.merge import merge_all
from persample.processes import Processes, merged, own_rows
from persample.reductions.base import Reductions
from persample.utils import rng

# From dL/dz, one per leaf of z, to the leaves of every reduction and whether z depends on any parameter.
Pullback: TypeAlias = Callable[[Sequence[Tensor | None]], Any]
_NOT_CONNECTED = (
    "encode_fn: expected z that depends on params, received z that depends on none of them. Likely causes: it uses a "
    "module or tensors it closed over instead of the params it is given, every path is detached, or the parameters "
    "sit in a module hidden in a plain Python list (use nn.ModuleList). Compute z from the first argument."
)


def loss_and_gradients(
    encoders: Sequence[Encoder],
    head: LossHead,
    reductions: Reductions,
    recorder: BufferRecorder | None,
    processes: Processes,
) -> tuple[Tensor, Any, list[Any]]:
    """Compute L = g(z), the gradients of g's own parameters, and the reductions of the samples' contributions.

    Args:
        encoders: the encoders and their samples.
        head: the loss g.
        reductions: the reductions of the samples' contributions.
        recorder: records buffers in the first pass, if they are to be updated.
        processes: the processes that the samples are spread over.

    Returns:
        The loss, the gradients of its own parameters, and the merged leaves of every reduction.

    Raises:
        LossError: if z depends on no parameter.
    """
    sizes = list(
        zip(*processes.gather_objects([encoder.call.size for encoder in encoders]), strict=True)
    )  # each by rank
    inputs.check_averages(reductions.reductions, None, sum(map(sum, sizes)))
    encoded, pullbacks = zip(*(vjp(encoder, reductions, recorder, processes) for encoder in encoders), strict=True)
    z = [processes.gather_rows(*pair) for pair in zip(encoded, sizes, strict=True)]
    loss, loss_grads, cotangents = processes.together(lambda: _differentiated(head, z, processes))
    after = rng.Streams.now()
    try:
        own = (own_rows(*pair, processes.rank) for pair in zip(cotangents, sizes, strict=True))
        lifted = merge_all(pullback(rows) for pullback, rows in zip(pullbacks, own, strict=True))
        leaves, connected = merged(lifted, processes)
    finally:
        after.go_back()
    if not connected.value and any(map(sum, sizes)):
        raise LossError(_NOT_CONNECTED)
    return loss, loss_grads, leaves


def vjp(
    encoder: Encoder, reductions: Reductions, recorder: BufferRecorder | None, processes: Processes
) -> tuple[Any, Pullback]:
    """Encode all samples; return z and the function that back-propagates dL/dz (vector-Jacobian products)."""
    if encoder.is_one_plain_chunk:
        z, back_propagate = processes.together(lambda: encode_with_graph(encoder.call))
        return z, lambda cotangents: processes.together(lambda: reductions.lift(back_propagate(cotangents)))
    first = first_pass.encode(encoder, recorder, processes)
    return first.z, lambda cotangents: second_pass.back_propagate(encoder, first, cotangents, reductions, processes)


def _differentiated(head: LossHead, z: Sequence[Any], processes: Processes) -> tuple[Tensor, Any, Any]:
    before = None if processes.group is None else rng.snapshot()
    result = head.differentiate(z)
    if before is not None and rng.moved_since(before):
        raise LossError(
            "loss_fn drew random numbers: every process of the group would compute another loss. Draw them before, "
            "alike on every process, and let loss_fn close over them."
        )
    return result
