"""``torch.nn.utils.rnn``: sequences are padded, packed and unpacked by indices that all samples share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample._torch import pack_padded_sequence, pad_packed_sequence, pad_sequence
from persample.vmap_rules.batched import is_batched


def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Pack the indices of the rows, and look up the rows by these."""
    if is_batched(lengths):
        lengths.tolist()  # the result would have a shape of each sample's: vmap raises that it cannot read values
    x = x.transpose(0, 1) if batch_first else x
    indices = torch.arange(x.shape[0] * x.shape[1], device=x.device).view(*x.shape[:2], 1)
    indices, batch_sizes = pack_padded_sequence(indices, lengths, False)
    return x.flatten(0, 1)[indices.flatten()], batch_sizes


def _pad(
    sequences: Sequence[Tensor], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Tensor:
    gaps = [max(map(len, sequences)) - len(x) for x in sequences]
    sides = [(0, gap) if padding_side == "right" else (gap, 0) for gap in gaps]
    frames = [(*[0, 0] * (x.ndim - 1), *side) for x, side in zip(sequences, sides, strict=True)]
    padded = [F.pad(x, frame, value=padding_value) for x, frame in zip(sequences, frames, strict=True)]
    return torch.stack(padded, 0 if batch_first else 1)


def _unpack(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding: float, total_length: int
) -> tuple[Tensor, Tensor]:
    sequences = torch.arange(int(batch_sizes[0]), device=batch_sizes.device)
    is_element = sequences < batch_sizes[:, None]  # [T, N]: whether sequence n has an element t
    indices = torch.where(is_element, sequences + (batch_sizes.cumsum(0) - batch_sizes)[:, None], 0)
    missing = 0, 0, 0, total_length - len(is_element)
    indices, is_element = (F.pad(x, missing).to(data.device) for x in (indices, is_element))
    out = torch.where(is_element[(..., *[None] * (data.ndim - 1))], data[indices], padding)
    return out.transpose(0, 1) if batch_first else out, is_element.sum(0).cpu()


RULES: dict[Any, Callable[..., Any]] = {
    pad_sequence: _pad,
    pack_padded_sequence: _pack,
    pad_packed_sequence: _unpack,
}
