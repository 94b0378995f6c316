"""Shared by all losses over time: entries by action, padding, and the reduction over the steps of an episode."""

from __future__ import annotations

import torch
from torch import Tensor

from persample.errors import ArgumentError


def taken(rows: Tensor, a: Tensor) -> Tensor:
    """Return the entry of the taken action from each row, ``[*]``: of rows ``[*, A]`` and actions ``[*]``.

    Examples:
        >>> taken(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 0]))
        tensor([2., 3.])
    """
    return rows.gather(-1, a.long().unsqueeze(-1)).squeeze(-1)


def spread(x: Tensor | float, like: Tensor) -> Tensor:
    """Expand a value to one entry per step.

    Args:
        x: a number, or a tensor with the first axes of ``like`` (broadcasting would use the last axes).
        like: the steps, ``[T, *]``.

    Returns:
        The entries, ``[T, *]``, in the wider dtype of both.

    Examples:
        >>> spread(torch.tensor([1.0, 2.0]), torch.zeros(2, 3))
        tensor([[1., 1., 1.],
                [2., 2., 2.]])
    """
    if isinstance(x, Tensor):
        if x.shape == like.shape and x.dtype == like.dtype:
            return x
        x = x.reshape(*x.shape, *[1] * (like.ndim - x.ndim)) if x.ndim else x
    return torch.ones_like(like) * x


def real_steps(mask_t: Tensor | None, like: Tensor) -> Tensor:
    """Return which steps are real.

    Args:
        mask_t: True (or non-zero) at real steps, of the first axes of ``like``; None if all are.
        like: the steps, ``[T, *]``.

    Returns:
        The mask, ``[T, *]``, bool.

    Examples:
        >>> real_steps(torch.tensor([1, 0]), torch.zeros(2))
        tensor([ True, False])
    """
    if mask_t is not None and mask_t.shape == like.shape:
        return mask_t.bool()
    every = torch.ones_like(like, dtype=torch.bool)
    return every if mask_t is None else spread(mask_t.bool(), every)


def padding(mask_t: Tensor | None, like: Tensor) -> Tensor | None:
    """Return the mask of ``real_steps``; None if all are real: without padding, losses need half of the operations."""
    return None if mask_t is None else real_steps(mask_t, like)


def unpadded(mask: Tensor | None, x: Tensor, fill: float = 0) -> Tensor:
    """Overwrite padding before use: a product with 0 would keep its NaN in the gradient.

    Args:
        mask: True at real steps, ``[*]``; None if all are.
        x: entries of the steps, ``[*]``, or rows of them, ``[*, A]``.
        fill: the new content of padding.

    Returns:
        The entries, in the shape of ``x``.

    Examples:
        >>> unpadded(torch.tensor([True, False]), torch.tensor([1.0, torch.nan]))
        tensor([1., 0.])
    """
    if mask is None:
        return x
    if mask.ndim < x.ndim:  # contiguous: repeating an expanded tensor twice takes torch four times as long
        mask = mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)).expand_as(x).contiguous()
    return torch.where(mask, x, fill)


def over_time(loss_t: Tensor, mask: Tensor | None, reduction: str) -> Tensor:
    """Reduce the losses of the steps.

    Args:
        loss_t: one loss per step, 0 at padding, ``[T]``.
        mask: True at real steps, ``[T]``; None if all are.
        reduction: "sum", "mean" over real steps (0 if there are none) or "none".

    Returns:
        The loss, ``[]``; ``[T]`` for "none".

    Raises:
        ArgumentError: if ``reduction`` is unknown.

    Examples:
        >>> over_time(torch.tensor([1.0, 2.0, 0.0]), torch.tensor([True, True, False]), "mean")
        tensor(1.5000)
    """
    if reduction not in ("sum", "mean", "none"):
        fix = "'sum' is the REINFORCE estimator."
        raise ArgumentError.about("reduction", expected="'sum', 'mean' or 'none'", received=repr(reduction), fix=fix)
    if reduction == "none":
        return loss_t
    total = loss_t.sum(-1)
    if reduction == "sum":
        return total
    return total / (max((1, *loss_t.shape[-1:])) if mask is None else mask.sum(-1).clamp(min=1))
