"""Functions of torch on the rows of all samples: convolutions and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from persample._torch import temporarily_clear_interpreter_stack
from persample.engines.layers.shared import Vmap
from persample.vmap_rules.levels import batched
from persample.vmap_rules.nn_functional import REDUCTIONS

_OPTIONS = {"beta", "delta", "ignore_index"}  # of losses


class Geometry(NamedTuple):
    """How a kernel is moved over images, one number per spatial axis: the settings of ``aten.convolution``."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


def geometry_of(
    kernel: Tensor, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Geometry | None:
    """Return the geometry that ``F.conv2d`` and its like are given, or None if the two sides are padded unequally."""
    sizes = kernel.shape[2:]
    strides, dilations = (_per_axis(x, len(sizes)) for x in (stride, dilation))
    if isinstance(padding, str):
        total = [apart * (size - 1) * (padding == "same") for apart, size in zip(dilations, sizes, strict=True)]
        if any(x % 2 for x in total):
            return None
        padding = [x // 2 for x in total]
    return Geometry(strides, _per_axis(padding, len(sizes)), dilations, False, (0,) * len(sizes), groups)


def transposed_geometry_of(  # noqa: PLR0917 - as torch's
    kernel: Tensor, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1
) -> Geometry | None:
    """Return the geometry that ``F.conv_transpose2d`` and its like are given.

    None if the output is padded by a whole stride: a convolution of the output would be larger than the images.
    """
    settings = (_per_axis(x, kernel.ndim - 2) for x in (stride, padding, dilation, output_padding))
    stride, padding, dilation, output_padding = settings
    fits = all(pad < step for pad, step in zip(output_padding, stride, strict=True))
    return Geometry(stride, padding, dilation, True, output_padding, groups) if fits else None


def _per_axis(x: Any, axes: int) -> tuple[int, ...]:
    values = tuple(map(int, x if isinstance(x, Sequence) else (x,)))  # numbers of NumPy, too
    return values * axes if len(values) == 1 else values


def loss_of_rows(vmap: Vmap, function: Any, input: Any, target: Any, *args: Any, **options: Any) -> Any:  # noqa: A002
    """Call one of ``LOSSES`` once for all samples; return ``NotImplemented`` for arguments that this does not know."""
    given = {name: option for name, option in options.items() if option is not None}
    reduction, smoothing = given.pop("reduction", "mean"), given.pop("label_smoothing", 0)
    if args or smoothing or not given.keys() <= _OPTIONS or reduction not in REDUCTIONS:
        return NotImplemented
    one, other = vmap.rows(input), vmap.rows(target)
    if one is None or other is None or one[1] != other[1] or not input.numel():
        return NotImplemented
    has_classes = function is F.cross_entropy
    if has_classes:
        fits = target.dtype == torch.long and input.ndim in {1, 2} and input.shape[:-1] == target.shape
    else:
        fits = input.shape == target.shape and input.is_floating_point() and target.is_floating_point()
    if not fits:
        return NotImplemented
    (rows, levels), (targets, _) = one, other
    with temporarily_clear_interpreter_stack():
        flat = (rows.flatten(0, -2), targets.flatten()) if has_classes else (rows, targets)
        losses = function(*flat, reduction="none", **given).view(targets.shape)
        own = tuple(range(len(levels), losses.ndim))
        if reduction == "mean" and has_classes:
            kept = targets != given.get("ignore_index", -100)
            losses = losses.sum(own) / kept.sum(own) if own else losses / kept  # 0 / 0 where none is kept
        elif own:
            losses = REDUCTIONS[reduction](losses, own)
    return batched(losses, levels)


LOSSES: set[Any] = {F.cross_entropy, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss}
