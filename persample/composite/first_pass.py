"""The first pass: z of every sample, without a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from persample.composite.buffers import BufferRecorder
from persample.composite.encoder import Encoder
from persample.composite.interim import Call, diagnosed, no_rows, of_fake_sample, unwritten, vmapped
from persample.errors import LossError
from persample.inputs.loss import SampleLoss
from persample.utils import trees
from persample.utils.fallback import explained
from persample.vmap_rules import rewritten


def encode(encoder: Encoder, recorder: BufferRecorder | None) -> Any:
    """Encode all samples, chunk by chunk.

    Args:
        encoder: the encoder and its samples.
        recorder: records the buffers after each chunk, if they are to be updated.

    Returns:
        z: a tree of detached tensors ``[n, ...]`` in memory of their own.
    """
    encode_chunk = _MODES[encoder.mode]
    with unwritten(encoder.call):
        chunks = encoder.chunks() if recorder is None else map(recorder.recorded, encoder.chunks())
        pieces = [trees.tree_map(compact, encode_chunk(chunk)) for chunk in chunks]
    return trees.tree_map(lambda *rows: torch.cat(rows), *pieces)


def compact(z: Tensor) -> Tensor:
    """Return z detached, without the larger tensor that it may be a view of (one token of a sequence, say)."""
    alone = z.untyped_storage().nbytes() == z.numel() * z.element_size()
    return z.detach() if alone else z.detach().clone(memory_format=torch.contiguous_format)


def _under_vmap(chunk: Call) -> Any:
    encoder = chunk.loss

    def one(params: Sequence[Tensor], leaves: Sequence[Any]) -> Any:
        with rewritten():
            return _checked(encoder, encoder.returned(params, leaves), one_row=encoder.keep_batch_dim)

    if not chunk.size:
        return _of_no_samples(chunk)
    with diagnosed(chunk, batched=True), explained():
        return _without_kept_axis(encoder, vmapped(one, chunk))


def _one_by_one(chunk: Call) -> Any:
    if not chunk.size:
        return _of_no_samples(chunk)
    encoder, rows = chunk.loss, []
    for i in range(chunk.size):
        with diagnosed(chunk, batched=False):
            rows.append(_checked(encoder, encoder.returned(*chunk.at(i)), one_row=encoder.keep_batch_dim))
    return _without_kept_axis(encoder, trees.tree_map(lambda *z: torch.stack(z), *rows))


def of_chunk(chunk: Call) -> Any:
    """Encode a chunk by one call of an encoder that takes chunks.

    Args:
        chunk: the samples.

    Returns:
        z, with a graph if gradients are enabled.

    Raises:
        LossError: if z does not hold one row per sample.
    """
    encoder = chunk.loss
    with diagnosed(chunk, batched=False):
        z = _checked(encoder, encoder.returned(chunk.params, chunk.leaves), one_row=False)
    for path, leaf in _named(z):
        if leaf.shape[:1] != (chunk.size,):
            raise LossError(
                f"{encoder.called}: with batched=True expected {path} to hold one row for each of the {chunk.size} "
                f"samples of a chunk, received shape {list(leaf.shape)}. Return [chunk, ...], or write encode_fn for "
                "one sample and leave batched=False."
            )
    return z


_MODES = {"eager": _under_vmap, "loop": _one_by_one, "batched": of_chunk}


def _checked(encoder: SampleLoss, z: Any, *, one_row: bool) -> Any:
    named = _named(z)
    for path, leaf in named:
        if not isinstance(leaf, Tensor):
            raise LossError(
                f"{encoder.called}: expected {path} to be a tensor, received {type(leaf).__name__}. Return a tensor, "
                "or a dict, tuple or list of tensors."
            )
        if one_row and leaf.shape[:1] != (1,):
            raise LossError(
                f"{encoder.called}: with keep_batch_dim=True expected {path} to keep the leading axis of 1, received "
                f"shape {list(leaf.shape)}. Return [1, ...]."
            )
    if not named:
        raise LossError(f"{encoder.called}: expected tensors, received an empty {type(z).__name__}. Return z.")
    return z


def _named(z: Any) -> list[tuple[str, Any]]:
    return list(zip(trees.paths(z, "z"), trees.flatten(z)[0], strict=True))


def _without_kept_axis(encoder: SampleLoss, rows: Any) -> Any:
    return trees.tree_map(lambda x: x.squeeze(1), rows) if encoder.keep_batch_dim else rows


def _of_no_samples(chunk: Call) -> Any:
    """Return no rows; one fake sample determines their shapes."""
    encoder = chunk.loss
    z = _checked(encoder, of_fake_sample(encoder.returned, chunk), one_row=encoder.keep_batch_dim)
    return _without_kept_axis(encoder, trees.tree_map(no_rows, z))
