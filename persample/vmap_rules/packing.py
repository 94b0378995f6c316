"""``torch.nn.utils.rnn``: sequences padded, packed and unpacked by places that no sample determines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample._torch import pack_padded_sequence, pad_packed_sequence, pad_sequence


def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    x = x.transpose(0, 1) if batch_first else x
    places = torch.arange(x.shape[0] * x.shape[1], device=x.device).view(*x.shape[:2], 1)
    places, batch_sizes = pack_padded_sequence(places, lengths, False)
    return x.flatten(0, 1)[places.flatten()], batch_sizes


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
    members = torch.arange(int(batch_sizes[0]))
    kept = members < batch_sizes[:, None]
    places = torch.where(kept, members + (batch_sizes.cumsum(0) - batch_sizes)[:, None], 0)
    rows, kept = (F.pad(x, (0, 0, 0, total_length - len(kept))).to(data.device) for x in (places, kept))
    out = torch.where(kept[(..., *[None] * (data.ndim - 1))], data[rows], padding)
    return out.transpose(0, 1) if batch_first else out, kept.sum(0).cpu()


PACKING: dict[Any, Callable[..., Any]] = {
    pad_sequence: _pad,
    pack_padded_sequence: _pack,
    pad_packed_sequence: _unpack,
}
