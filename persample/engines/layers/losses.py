"""Losses of torch on the rows of all samples: under vmap, torch takes most of them apart into many operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from persample._torch import temporarily_clear_interpreter_stack
from persample.engines.layers.shared import Vmap

_OPTIONS = {"beta", "delta", "ignore_index"}


def loss_of_rows(vmap: Vmap, function: Any, input: Any, target: Any, *args: Any, **options: Any) -> Any:  # noqa: A002
    """Call one of ``LOSSES``, or return ``NotImplemented`` for arguments that it takes in another way.

    Args:
        vmap: the vmap around the loss.
        function: the function of torch.
        input: predictions or logits, one per sample.
        target: targets of the same shape, or classes; one per sample.
        *args: further arguments.
        **options: further arguments by name.
    """
    given = {name: option for name, option in options.items() if option is not None}
    reduction, smoothing = given.pop("reduction", "mean"), given.pop("label_smoothing", 0)
    if args or smoothing or not given.keys() <= _OPTIONS or reduction not in _REDUCTIONS:
        return NotImplemented
    one, other = vmap.rows(input), vmap.rows(target)
    if one is None or other is None or one[1] != other[1] or not input.numel():
        return NotImplemented
    if not LOSSES[function](input, target):
        return NotImplemented
    (rows, levels), (targets, _) = one, other
    with temporarily_clear_interpreter_stack():
        has_classes = function is F.cross_entropy
        flat = (rows.flatten(0, -2), targets.flatten()) if has_classes else (rows, targets)
        losses = function(*flat, reduction="none", **given).view(targets.shape)
        own = tuple(range(len(levels), losses.ndim))
        if reduction == "mean" and has_classes:
            kept = targets != given.get("ignore_index", -100)
            losses = losses.sum(own) / kept.sum(own) if own else losses / kept  # 0 / 0 where none is kept
        elif own:
            losses = _REDUCTIONS[reduction](losses, own)
    return vmap.batched(losses, levels)


def _are_numbers(x: Tensor, target: Tensor) -> bool:
    return x.shape == target.shape and x.is_floating_point() and target.is_floating_point()


def _are_classes(x: Tensor, target: Tensor) -> bool:
    return target.dtype == torch.long and x.ndim in {1, 2} and x.shape[:-1] == target.shape


_REDUCTIONS: dict[str, Callable[..., Tensor]] = {"mean": torch.mean, "sum": torch.sum, "none": lambda x, _: x}
LOSSES: dict[Any, Callable[[Tensor, Tensor], bool]] = {
    F.cross_entropy: _are_classes,
    **dict.fromkeys((F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss), _are_numbers),
}
