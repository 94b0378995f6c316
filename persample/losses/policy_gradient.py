"""Policy-gradient losses, for one episode."""

from __future__ import annotations

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.trees import stop_gradient


def reinforce_loss(
    logits_t: Tensor, a_t: Tensor, return_t: Tensor, mask_t: Tensor | None = None, *, reduction: str = "sum"
) -> Tensor:
    """Compute the REINFORCE loss −Σₜ log π(aₜ|sₜ) Gₜ of one episode.

    Its gradient with ``reduction="sum"`` is minus the REINFORCE estimator of Williams, "Simple Statistical
    Gradient-Following Algorithms" (1992). No gradient flows through ``return_t``. Padding contributes exactly zero to
    loss and gradient, whatever it holds (NaN, ∞, an action of −1).

    Args:
        logits_t: unnormalized log-probabilities of the actions, ``[T, A]``.
        a_t: actions taken, integers, ``[T]``.
        return_t: returns (or advantages) of the steps, ``[T]``.
        mask_t: True (or non-zero) at real steps, ``[T]``; None if all are.
        reduction: over time: "sum" (the estimator), "mean" over unmasked steps (0 if there are none) or "none".

    Returns:
        The loss, ``[]``; ``[T]`` for "none".

    Raises:
        ArgumentError: if ``reduction`` is none of these.

    Examples:
        >>> logits, a_t = torch.zeros(3, 2), torch.tensor([0, 1, -1])
        >>> reinforce_loss(logits, a_t, torch.tensor([1.0, 1.0, torch.nan]), torch.tensor([True, True, False]))
        tensor(1.3863)
    """
    if reduction not in ("sum", "mean", "none"):
        fix = "'sum' is the REINFORCE estimator."
        raise ArgumentError.about("reduction", expected="'sum', 'mean' or 'none'", received=repr(reduction), fix=fix)
    mask: Tensor = torch.ones_like(a_t, dtype=torch.bool) if mask_t is None else mask_t.bool()
    # Padding is replaced before it is used: multiplying by a mask afterwards would keep its NaN alive in the gradient.
    log_pi = torch.log_softmax(torch.where(mask[..., None], logits_t, 0), dim=-1)
    taken = torch.where(mask, a_t, 0).long()
    log_pi_a = log_pi.gather(-1, taken[..., None]).squeeze(-1)
    loss_t = -log_pi_a * stop_gradient(torch.where(mask, return_t, 0))
    if reduction == "none":
        return loss_t
    total = loss_t.sum(-1)
    return total if reduction == "sum" else total / mask.sum(-1).clamp(min=1)
