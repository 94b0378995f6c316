"""Losses of value distributions: on fixed atoms, or by quantiles."""

from __future__ import annotations

import torch
from torch import Tensor

from persample.losses.common import check_axes, check_not_negative, check_same, constant, overridable
from persample.losses.td import huber_loss


@overridable
def categorical_td_learning(
    v_atoms_tm1: Tensor,
    v_logits_tm1: Tensor,
    r_t: Tensor,
    discount_t: Tensor | float,
    v_atoms_t: Tensor,
    v_logits_t: Tensor,
    stop_target_gradients: bool = True,
) -> Tensor:
    """Compute the cross-entropy of a value distribution at time t−1 with its Bellman target, projected on its atoms.

    The target distribution has atoms rₜ + γₜ zⱼ with probabilities softmax(v_logits_t)ⱼ. Each probability is split
    between the two nearest atoms of ``v_atoms_tm1``, linearly in the distance. Name and argument order follow RLax.
    Source: Bellemare, Dabney, Munos, "A Distributional Perspective on Reinforcement Learning" (2017).

    Args:
        v_atoms_tm1: atoms at time t−1 in ascending order, ``[K]``.
        v_logits_tm1: unnormalized log-probabilities of these atoms, ``[K]``.
        r_t: reward on the way to time t, ``[]``.
        discount_t: γ, or 0 where the episode terminated at time t, ``[]``.
        v_atoms_t: atoms at time t, ``[M]``.
        v_logits_t: unnormalized log-probabilities of these atoms, ``[M]``.
        stop_target_gradients: no gradient flows through the projected target.

    Returns:
        The loss, ``[]``.

    Raises:
        ArgumentError: if shapes do not fit.

    Examples:
        >>> atoms = torch.tensor([0.0, 1.0])
        >>> categorical_td_learning(atoms, torch.zeros(2), torch.tensor(0.5), 0.0, atoms, torch.zeros(2))
        tensor(0.6931)
    """
    check_axes(1, v_atoms_tm1=v_atoms_tm1, v_logits_tm1=v_logits_tm1, v_atoms_t=v_atoms_t, v_logits_t=v_logits_t)
    check_axes(0, r_t=r_t, discount_t=discount_t)
    check_same(v_atoms_tm1=v_atoms_tm1, v_logits_tm1=v_logits_tm1)
    check_same(v_atoms_t=v_atoms_t, v_logits_t=v_logits_t)
    target = _project(r_t + discount_t * v_atoms_t, torch.softmax(v_logits_t, -1), v_atoms_tm1)
    target = constant(target, stop_target_gradients=stop_target_gradients)
    return -(target * torch.log_softmax(v_logits_tm1, -1)).sum()


@overridable
def quantile_regression_loss(
    dist_src: Tensor, tau_src: Tensor, dist_target: Tensor, huber_param: float = 0.0, stop_target_gradients: bool = True
) -> Tensor:
    """Compute Σᵢ meanⱼ |τᵢ − 1[δᵢⱼ < 0]| L(δᵢⱼ) with δᵢⱼ = targetⱼ − srcᵢ: L is |δ|, or the Huber loss.

    Name, argument order and value follow RLax. The gradient differs in one point: ``stop_target_gradients`` stops the
    gradient of ``dist_target`` here, while RLax 0.1.9 passes it with either value of the flag. Source: Dabney et al.,
    "Distributional Reinforcement Learning with Quantile Regression" (2018), equation 10.

    Args:
        dist_src: predicted quantiles, ``[K]``.
        tau_src: their levels τ from 0 to 1, ``[K]``.
        dist_target: samples or quantiles of the target, ``[M]``.
        huber_param: δ of the Huber loss; 0 for the absolute error.
        stop_target_gradients: no gradient flows through ``dist_target``.

    Returns:
        The loss, ``[]``.

    Raises:
        ArgumentError: if shapes do not fit, or ``huber_param`` is negative.

    Examples:
        >>> quantile_regression_loss(torch.tensor([1.0]), torch.tensor([0.9]), torch.tensor([3.0, 0.0]))
        tensor(0.9500)
    """
    check_axes(1, dist_src=dist_src, tau_src=tau_src, dist_target=dist_target)
    check_same(dist_src=dist_src, tau_src=tau_src)
    check_not_negative("huber_param", huber_param, "Use 0 for the absolute error.")
    delta = constant(dist_target, stop_target_gradients=stop_target_gradients) - dist_src[:, None]
    weight = (tau_src[:, None] - (delta < 0).to(delta)).abs()
    loss = huber_loss(delta, huber_param) if huber_param > 0 else delta.abs()
    return (weight * loss).mean(1).sum()


def _project(z_p: Tensor, probs: Tensor, z_q: Tensor) -> Tensor:
    # The fraction of each gap between atoms that lies below z: 1 … 1, a fraction, 0 … 0. Its decreases are the shares.
    gaps, offsets = z_q.diff()[:, None], z_p - z_q[:-1, None]
    below = torch.where(gaps > 0, offsets / torch.where(gaps > 0, gaps, 1), (offsets >= 0).to(offsets)).clamp(0, 1)
    first, last = torch.ones_like(z_p)[None], torch.zeros_like(z_p)[None]
    return -torch.cat([first, below, last]).diff(dim=0) @ probs
