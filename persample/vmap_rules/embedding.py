"""Embeddings: ``F.embedding``, ``F.embedding_bag`` and ``F.one_hot``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample.utils.tracing import holds
from persample.vmap_rules.batched import is_batched, unwrapped


def _has_outside(index: Tensor, size: int) -> bool:
    """Return whether an index of any sample is negative or too large; a GPU, whose answer takes time, is not asked."""
    if not index.numel() or index.device.type != "cpu":
        return False
    least, largest = unwrapped(index).aminmax()
    return holds(unwrapped((least < 0) | (largest >= size)))


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes <= 0 or tensor.dtype != torch.long:
        return F.one_hot(tensor, num_classes)
    if _has_outside(tensor, num_classes):
        raise RuntimeError("Class values must be non-negative and smaller than num_classes.")
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()


def _embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
    of_samples = is_batched(weight) and weight.ndim == 2
    # torch.func looks up the tables of all samples as one: an index beyond a table is a row of another sample's, and
    # the row of padding is that of the first sample's alone, if plain autograd differentiates the lookup.
    if of_samples and _has_outside(input, len(weight)):
        raise IndexError("index out of range in self")
    if not of_samples or padding_idx is None or not -len(weight) <= padding_idx < len(weight):
        return F.embedding(input, weight, padding_idx, *args, **kwargs)
    rows = F.embedding(input, weight, None, *args, **kwargs)
    return torch.where((input == padding_idx % len(weight)).unsqueeze(-1), rows.detach(), rows)


def embedding_bag(  # noqa: PLR0917 - as torch's
    lookup: Callable[..., Tensor],
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
    """Compute ``F.embedding_bag`` of what ``lookup``, as ``F.embedding``, returns."""
    given = {name: x for name, x in locals().items() if name != "lookup"}
    own = per_sample_weights is None or (
        mode == "sum" and per_sample_weights.shape == input.shape and per_sample_weights.dtype == weight.dtype
    )
    bags = input.ndim == (2 if offsets is None else 1) and weight.ndim == 2 and not input.is_floating_point()
    padded = padding_idx is None or -len(weight) <= padding_idx < len(weight)
    known = own and bags and padded and mode in {"sum", "mean", "max"}
    if not known or max_norm is not None or scale_grad_by_freq or sparse:
        return F.embedding_bag(**given)  # torch raises, or vmap does
    rows = lookup(input, weight)  # [*, N, D]
    members = _members(input, offsets, include_last_offset)
    if padding_idx is not None:
        members = members & (input != padding_idx % len(weight))
    if mode == "max":
        rows = rows.expand(*members.shape, rows.shape[-1])
        first = torch.take_along_dim(rows, members.byte().argmax(-1, keepdim=True).unsqueeze(-1), -2)
        # torch's maximum begins with the first row of a bag, and no NaN is larger.
        best = torch.where(members.unsqueeze(-1) & ~rows.isnan(), rows, first).max(-2).values
        return torch.where(members.any(-1, keepdim=True), best, 0)
    # What is in no bag is replaced before it is multiplied, since a product of 0 and infinity is NaN.
    scale = members.to(rows.dtype)
    if mode == "mean":
        scale = scale / scale.sum(-1, keepdim=True).clamp(min=1)
    if per_sample_weights is not None:
        scale = torch.where(members, per_sample_weights, 0)
    if offsets is None:
        return (scale.unsqueeze(-2) @ torch.where(members.unsqueeze(-1), rows, 0)).squeeze(-2)
    rows = torch.where(members.any(0).unsqueeze(-1), rows, 0) * scale.sum(0).unsqueeze(-1)
    bag = members.byte().argmax(0).unsqueeze(-1).expand_as(rows)
    return rows.new_zeros(len(members), rows.shape[1]).scatter_add(0, bag, rows)


def _members(index: Tensor, offsets: Tensor | None, include_last_offset: bool) -> Tensor:
    """Return which entries of the index belong to which bag, ``[bags, N]`` bool."""
    if offsets is None:
        return torch.ones_like(index, dtype=torch.bool)
    ends = offsets[1:] if include_last_offset else F.pad(offsets[1:], (0, 1), value=len(index))
    places = torch.arange(len(index), device=index.device)
    return (places >= offsets[: len(ends), None]) & (places < ends[:, None])


RULES: dict[Any, Callable[..., Any]] = {
    F.embedding: _embedding,
    F.one_hot: _one_hot,
    F.embedding_bag: functools.partial(embedding_bag, _embedding),
}
