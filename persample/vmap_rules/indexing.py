"""Looking up rows and elements at per-sample places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample.vmap_rules.rows import is_batched


def _index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:  # noqa: A002
    index = index.reshape(1) if index.ndim == 0 else index  # a scalar index has no gradient under vmap
    rows = input.ndim == 2 and dim in {0, -2} and input.is_floating_point() and index.ndim == 1
    if rows and index.dtype == torch.long and not is_batched(input):  # whose own range it would not check
        return F.embedding(index, input)  # whose gradient is twice as fast
    return torch.index_select(input, dim, index)


def _getitem(x: Tensor, index: Any) -> Tensor:
    # Of an index i that is a scalar tensor torch asks the value: [i] has none, and leaves an axis of size 1 behind.
    parts: list[Any] = list(index) if isinstance(index, tuple) else [index]
    scalars = [isinstance(part, Tensor) and not part.ndim and is_batched(part) for part in parts]
    if not any(scalars) or any(isinstance(part, bool) or getattr(part, "dtype", None) in _MASKS for part in parts):
        return x[index]
    before: list[Any] = []
    for place, part in enumerate(parts):
        if part is Ellipsis:
            before = [slice(None)] * (x.ndim - sum(later is not None for later in parts[place + 1 :]))
        elif part is not None:
            if scalars[place]:
                x, parts[place] = x[(*before, part.unsqueeze(0))], 0
            before.append(slice(None))
    return x[tuple(parts)]


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes <= 0 or tensor.dtype != torch.long:
        return F.one_hot(tensor, num_classes)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()


def _embedding_bag(  # noqa: PLR0917 - as torch's
    input: Tensor,  # noqa: A002
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    given = dict(locals())
    own = per_sample_weights is None or (
        mode == "sum" and per_sample_weights.shape == input.shape and per_sample_weights.dtype == weight.dtype
    )
    bags = input.ndim == (2 if offsets is None else 1) and weight.ndim == 2 and not input.is_floating_point()
    padded = padding_idx is None or -len(weight) <= padding_idx < len(weight)
    known = own and bags and padded and mode in {"sum", "mean", "max"}
    if not known or max_norm is not None or scale_grad_by_freq or sparse:
        return F.embedding_bag(**given)  # raises, or is refused by vmap
    rows = F.embedding(input, weight)  # [*, N, D]
    members = _members(input, offsets, include_last_offset)
    if padding_idx is not None:
        kept = input != padding_idx % len(weight)
        members, rows = members & kept, torch.where(kept.unsqueeze(-1), rows, 0)
    if mode == "max":
        best = torch.where(members.unsqueeze(-1), rows, -torch.inf).max(-2).values
        return torch.where(members.any(-1, keepdim=True), best, 0)
    scale = members.to(rows.dtype)
    if mode == "mean":
        scale = scale / scale.sum(-1, keepdim=True).clamp(min=1)
    if per_sample_weights is not None:
        scale = scale * per_sample_weights
    return (scale.unsqueeze(-2) @ rows).squeeze(-2)


def _members(index: Tensor, offsets: Tensor | None, include_last_offset: bool) -> Tensor:
    # Which places of the index belong to which bag, [bags, N].
    if offsets is None:
        return torch.ones_like(index, dtype=torch.bool)
    ends = offsets[1:] if include_last_offset else F.pad(offsets[1:], (0, 1), value=len(index))
    places = torch.arange(len(index), device=index.device)
    return (places >= offsets[: len(ends), None]) & (places < ends[:, None])


_MASKS = {torch.bool, torch.uint8}
LOOKUPS: dict[Any, Callable[..., Any]] = {
    torch.index_select: _index_select,
    Tensor.index_select: _index_select,
    Tensor.__getitem__: _getitem,
    F.one_hot: _one_hot,
    F.embedding_bag: _embedding_bag,
}
