"""Returns of trajectories, computed for all time steps at once."""

from __future__ import annotations

import torch
from torch import Tensor


def discounted_returns(r_t: Tensor, discount_t: Tensor | float, v_t: Tensor | float) -> Tensor:
    """Compute the discounted returns Gₜ = rₜ₊₁ + γₜ₊₁ Gₜ₊₁ of a trajectory, bootstrapped at its end.

    Names, argument order and meaning are RLax's. The recursion is solved by doubling, in ⌈log₂ T⌉ steps without a
    loop over time, which vmap batches and which is exact where a discount is 0.

    Args:
        r_t: rewards at times 1 … T, ``[T]`` (further axes elementwise).
        discount_t: discounts at times 1 … T, ``[T]`` or one for all.
        v_t: values at times 1 … T, of which the last bootstraps, ``[T]``; or that last value alone, ``[]``.

    Returns:
        G₀ … G_{T−1}, ``[T]``.

    Examples:
        >>> discounted_returns(torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.5, 0.5, 0.0]), 9.0)
        tensor([1.7500, 1.5000, 1.0000])
    """
    discounts = torch.ones_like(r_t) * _time_first(discount_t, r_t)
    values = torch.ones_like(r_t) * _time_first(v_t, r_t)
    # After the step of width k, returns[t] sums the rewards of k steps and discounts[t] multiplies their discounts.
    returns = torch.cat([r_t[:-1], r_t[-1:] + discounts[-1:] * values[-1:]])
    width = 1
    while width < r_t.shape[0]:
        head = returns[:-width] + discounts[:-width] * returns[width:]
        returns = torch.cat([head, returns[-width:]])
        discounts = torch.cat([discounts[:-width] * discounts[width:], discounts[-width:]])
        width *= 2
    return returns


def _time_first(x: Tensor | float, like: Tensor) -> Tensor | float:
    """Return x with its axes in the first places of those of ``like``, where broadcasting would take the last."""
    if not isinstance(x, Tensor) or x.ndim == 0:
        return x
    return x.reshape(*x.shape, *[1] * (like.ndim - x.ndim))
