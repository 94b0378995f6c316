"""Along an axis: indexing for reading and writing, embeddings, selecting, rolling, and running products."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from persample.utils.numerics import is_autocast
from persample.utils.tracing import holds, is_batched, is_unreadable, unwrapped
from persample.utils.trees import Leaf
from persample.vmap_rules.levels import Function, Rules, call_kernel

_embedding_of_torch: Function = F.embedding


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


def _embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: object, **kwargs: object
) -> Tensor:
    of_samples = is_batched(weight) and weight.ndim == 2
    # torch.func looks up the tables of all samples as one: an index beyond a table is a row of another sample's, and
    # the row of padding is that of the first sample's alone, if plain autograd differentiates the lookup.
    if of_samples and _has_outside(input, len(weight)):
        raise IndexError("index out of range in self")
    if not of_samples or padding_idx is None or not -len(weight) <= padding_idx < len(weight):
        return _embedding_of_torch(input, weight, padding_idx, *args, **kwargs)
    rows = _embedding_of_torch(input, weight, None, *args, **kwargs)
    return torch.where((input == padding_idx % len(weight)).unsqueeze(-1), rows.detach(), rows)


def embedding_bag(
    lookup: Function,
    input: Tensor,
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
    if offsets is None and padding_idx is None and per_sample_weights is None and mode != "max":
        total = rows.sum(-2)
        return total / max(1, input.shape[-1]) if mode == "mean" else total
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


_MASKS = {torch.bool, torch.uint8}
_BASIC = {int, slice, type(Ellipsis)}
_ROW_NUMBERS = {torch.int32, torch.int64}


def _index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    index = index.reshape(1) if index.ndim == 0 else index  # under vmap a 0-d index has no gradient
    return torch.index_select(input, dim, index)


def is_row(index: object) -> bool:
    """Return whether an index gives a view of one sample, and a copy under vmap: 0-d tensors, numbers, slices."""
    parts = index if isinstance(index, tuple) else (index,)
    scalars = list(filter(_is_row_number, parts))
    known = sum(part is None or type(part) in _BASIC for part in parts)
    return len(scalars) + known == len(parts) and any(map(is_unreadable, scalars))


def _is_row_number(part: object) -> bool:
    return isinstance(part, Tensor) and not part.ndim and part.dtype in _ROW_NUMBERS


def getitem(x: Tensor, index: Leaf) -> Tensor:
    """Index a tensor without reading 0-d indices i, which vmap and traces forbid: by [i], whose axis is removed."""
    parts: list[Leaf] = list(index) if isinstance(index, tuple) else [index]
    scalars = [isinstance(part, Tensor) and not part.ndim and is_unreadable(part) for part in parts]
    if not any(scalars) or any(isinstance(part, bool) or getattr(part, "dtype", None) in _MASKS for part in parts):
        return x[index]
    before: list[slice] = []
    for place, part in enumerate(parts):
        if part is Ellipsis:
            before = [slice(None)] * (x.ndim - sum(later is not None for later in parts[place + 1 :]))
        elif part is not None:
            if scalars[place]:
                x, parts[place] = x[(*before, part.unsqueeze(0))], 0
            before.append(slice(None))
    return x[tuple(parts)]


def setitem(x: Tensor, index: Leaf, value: Leaf) -> None:
    """Write into a tensor without reading the values of 0-d indices beside slices and numbers, or those of a mask."""
    is_mask = is_batched(index) and index.dtype == torch.bool and index.shape == x.shape[: index.ndim]
    if is_mask and not getattr(value, "ndim", 0):
        x.copy_(torch.where(index.view(*index.shape, *[1] * (x.ndim - index.ndim)), value, x))
        return
    parts = index if isinstance(index, tuple) else (index,)
    scalars = [_is_row_number(part) and is_unreadable(part) for part in parts]
    if not any(scalars) or not all(
        is_scalar or part is None or type(part) in _BASIC for part, is_scalar in zip(parts, scalars, strict=True)
    ):
        x[index] = value
        return
    view = x[tuple(slice(None) if is_scalar else part for part, is_scalar in zip(parts, scalars, strict=True))]
    places, axes = [place for place, is_scalar in enumerate(scalars) if is_scalar], []
    for place in places:
        before, after = (sum(type(part) is not int for part in side) for side in (parts[:place], parts[place + 1 :]))
        axes.append(view.ndim - 1 - after if any(part is Ellipsis for part in parts[:place]) else before)
    # Their axes come first: torch.func loses the order of axes elsewhere.
    view.movedim(axes, list(range(len(axes))))[tuple(parts[place].unsqueeze(0) for place in places)] = (
        value.to(x.dtype) if isinstance(value, Tensor) else value
    )


def _index_add(add: Function, input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: complex = 1) -> Tensor:
    in_place = add is Tensor.index_add_
    if (in_place and source is input) or not _adds_rows(input, dim, index, source):
        return add(input, dim, index, source, alpha=alpha)  # adds, or raises
    places = _along(index.long(), input.ndim, dim).expand_as(source)
    out = torch.scatter_add(input, dim, places, source if alpha == 1 else source * alpha)
    return input.copy_(out) if in_place else out


def _adds_rows(x: Tensor, dim: object, index: Tensor, source: Tensor) -> bool:
    """Return whether indices differ between samples: torch.func adds row after row, scatter_add all at once.

    Of integers torch also checks that alpha is in their range.
    """
    rows = is_batched(index) and index.ndim == 1 and index.dtype in _ROW_NUMBERS
    if not (rows and isinstance(dim, int) and -x.ndim <= dim < x.ndim):
        return False
    shape = list(x.shape)
    shape[dim] = len(index)
    return list(source.shape) == shape and source.dtype == x.dtype and (x.is_floating_point() or x.is_complex())


def _index_fill(fill: Function, input: Tensor, dim: int, index: Tensor, value: Leaf) -> Tensor:
    # A tensor that all samples share is filled by torch.func with the last sample's value.
    is_scalar = isinstance(value, Tensor) and not value.ndim and (input.is_complex() or not value.is_complex())
    axes = max(input.ndim, 1)
    if not is_scalar or not isinstance(dim, int) or not -axes <= dim < axes:
        return fill(input, dim, index, value)  # fills with a number, or raises
    rows = torch.zeros(input.shape[dim] if input.ndim else 1, dtype=torch.bool, device=input.device)
    mask = _along(rows.index_fill(0, index, True), input.ndim, dim)
    out = torch.where(mask, value.to(input.dtype), input)
    return input.copy_(out) if fill is Tensor.index_fill_ else out


def _along(x: Tensor, ndim: int, dim: int) -> Tensor:
    """Return ``x [n]`` with n along one of ``ndim`` axes, and 1 along the others."""
    shape = [1] * ndim
    if shape:
        shape[dim] = len(x)
    return x.view(shape)


def _masked_select(input: Tensor, mask: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(input.shape, mask.shape)  # torch.func's gradient keeps this shape
    return torch.masked_select(input.expand(shape), mask.expand(shape))


def _roll(input: Tensor, *args: Leaf, **kwargs: Leaf) -> Tensor:
    if input.ndim:
        return torch.roll(input, *args, **kwargs)
    torch.roll(torch.zeros(()), *args, **kwargs)  # may raise
    return input.clone()  # torch.func would roll the samples of a scalar


def _select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    if not isinstance(index, int) or src.shape != input.select(dim, index).shape:
        return torch.select_scatter(input, src, dim, index)  # raises
    size = input.shape[dim]
    chosen = torch.arange(size, device=input.device) == index % size
    return torch.where(_along(chosen, input.ndim, dim), src.unsqueeze(dim % input.ndim).to(input.dtype), input)


def _cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    kind = input.dtype if dtype is None else dtype
    known = isinstance(dim, int) and -input.ndim <= dim < input.ndim and kind.is_floating_point
    if not known or not input.is_floating_point() or is_autocast(input.device):
        return torch.cumprod(input, dim, dtype=dtype)
    axis = dim % input.ndim - input.ndim  # axes of samples come in front
    return call_kernel(lambda x: (torch.cumprod(x, axis),), partial(_cumprod_gradients, axis), input.to(kind))[0]


def _cumprod_gradients(axis: int, _: Sequence[bool], grad: Tensor, x: Tensor, product: Tensor) -> tuple[Tensor]:
    """Return Σ_{j ≥ k} ∂_j Π_{i ≤ j, i ≠ k} x_i: the sum of later ∂_j y_j, over x_k.

    At the first zero of x, the products are those with 1 in its place; behind it they are all 0.
    """
    zeros = (x == 0).cumsum(axis)
    is_first = (x == 0) & (zeros == 1)
    before = _sum_of_later(grad * product, axis) / torch.where(x == 0, 1, x)
    at_first = _sum_of_later(grad * torch.cumprod(torch.where(is_first, 1, x), axis), axis)
    return (torch.where(is_first, at_first, torch.where(zeros > 0, 0, before)),)


def _sum_of_later(x: Tensor, axis: int) -> Tensor:
    return x.flip(axis).cumsum(axis).flip(axis)


OF_SCALARS = {torch.squeeze, Tensor.squeeze, Tensor.squeeze_}


def of_scalar(function: Function, input: Tensor, *args: object, **kwargs: object) -> Tensor | None:
    """Return what a function that failed makes of a scalar, whose axis -1 torch.func does not have, if that is why."""
    if not is_batched(input) or input.ndim:
        return None
    function(torch.zeros(()), *args, **kwargs)  # may raise
    return input if function is Tensor.squeeze_ else input.view_as(input)


RULES: Rules = {
    F.embedding: _embedding,
    F.one_hot: _one_hot,
    F.embedding_bag: partial(embedding_bag, _embedding),
    Tensor.__getitem__: getitem,
    Tensor.__setitem__: setitem,
    **{add: partial(_index_add, add) for add in (torch.index_add, Tensor.index_add, Tensor.index_add_)},
    **{fill: partial(_index_fill, fill) for fill in (torch.index_fill, Tensor.index_fill, Tensor.index_fill_)},
    **dict.fromkeys((torch.index_select, Tensor.index_select), _index_select),
    **dict.fromkeys((torch.masked_select, Tensor.masked_select), _masked_select),
    **dict.fromkeys((torch.roll, Tensor.roll), _roll),
    **dict.fromkeys((torch.select_scatter, Tensor.select_scatter), _select_scatter),
}
FIRST_DERIVATIVE_RULES: Rules = dict.fromkeys((torch.cumprod, Tensor.cumprod), _cumprod)
