"""The first pass: z of every sample, without a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from persample.composite.encoder import Tower
from persample.engines.diagnosis import diagnosed, unwritten
from persample.engines.empty import no_rows, of_fake_sample
from persample.engines.vmap import vmapped
from persample.errors import LossError
from persample.inputs.call import Call
from persample.inputs.loss import SampleLoss
from persample.utils import trees
from persample.vmap_rules import rewritten

Encode = Callable[[SampleLoss, Call], Any]  # from one chunk to its z, a tree of tensors ``[k, ...]``


def first_pass(tower: Tower, encode: Encode) -> Any:
    """Encode all samples, chunk by chunk.

    Args:
        tower: the encoder and its samples.
        encode: how a chunk is encoded.

    Returns:
        z: a tree of detached tensors ``[n, ...]`` in memory of their own.
    """
    with unwritten(tower.samples):
        pieces = [trees.tree_map(_compact, encode(tower.encoder, chunk)) for chunk in tower.chunks()]
    return trees.tree_map(lambda *rows: torch.cat(rows), *pieces)


def _compact(z: Tensor) -> Tensor:
    """Return z alone: as the view it may be (of one token's states), it keeps everything beside it in memory."""
    alone = z.untyped_storage().nbytes() == z.numel() * z.element_size()
    return z.detach() if alone else z.detach().clone(memory_format=torch.contiguous_format)


def at_once(encoder: SampleLoss, samples: Call) -> Any:
    """Encode the samples of a chunk under vmap.

    Args:
        encoder: f.
        samples: the chunk.

    Returns:
        Their z.
    """

    def one(params: Sequence[Tensor], leaves: Sequence[Any]) -> Any:
        with rewritten():
            return _checked(encoder, encoder.returned(params, leaves), one_row=encoder.keep_batch_dim)

    if not samples.size:
        return _of_no_samples(encoder, samples)
    with diagnosed(samples, batched=True):
        return _without_kept_axis(encoder, vmapped(one, samples))


def one_by_one(encoder: SampleLoss, samples: Call) -> Any:
    """Encode the samples of a chunk one after the other.

    Args:
        encoder: f.
        samples: the chunk.

    Returns:
        Their z.
    """
    if not samples.size:
        return _of_no_samples(encoder, samples)
    rows = []
    for i in range(samples.size):
        with diagnosed(samples, batched=False):
            rows.append(_checked(encoder, encoder.returned(*samples.at(i)), one_row=encoder.keep_batch_dim))
    return _without_kept_axis(encoder, trees.tree_map(lambda *z: torch.stack(z), *rows))


def whole(encoder: SampleLoss, samples: Call) -> Any:
    """Encode a chunk in one call of an encoder that takes chunks.

    Args:
        encoder: f, of a whole chunk.
        samples: the chunk.

    Returns:
        Their z.

    Raises:
        LossError: if z does not hold one row per sample.
    """
    with diagnosed(samples, batched=False):
        z = _checked(encoder, encoder.returned(samples.params, samples.leaves), one_row=False)
    for path, leaf in _named(z):
        if leaf.shape[:1] != (samples.size,):
            raise LossError(
                f"{encoder.called}: with batched=True expected {path} to hold one row for each of the {samples.size} "
                f"samples of a chunk, received shape {list(leaf.shape)}. Return [chunk, ...], or write encode_fn for "
                "one sample and leave batched=False."
            )
    return z


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


def _of_no_samples(encoder: SampleLoss, samples: Call) -> Any:
    """Return no rows, their shapes taken from one fake sample."""
    z = _checked(encoder, of_fake_sample(encoder.returned, samples), one_row=encoder.keep_batch_dim)
    return _without_kept_axis(encoder, trees.tree_map(no_rows, z))
