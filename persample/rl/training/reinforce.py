"""REINFORCE with a baseline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from persample.losses import discounted_returns, gaussian_policy_gradient_loss, reinforce_loss
from persample.rl.check import Envs
from persample.rl.networks import ActorCritic, sampling
from persample.rl.rollouts import collect_episodes
from persample.rl.training.algorithm import Batch, Episodic, batch_of


@dataclass(frozen=True)
class Reinforce(Episodic):
    """REINFORCE with a learned baseline (Sutton and Barto 2018, section 13.4); a sample is an episode.

    ℓ = Σₜ −log π(aₜ|sₜ) Aₜ + c (v(sₜ) − Gₜ)². Gₜ are the returns of the received rewards (a time limit ends an
    episode), Aₜ the advantages Gₜ − v(sₜ) before the update, standardized over all steps of the batch.

    Args:
        discount: γ.
        hidden: width of the two hidden layers of policy and value function.
        batch: episodes per update B.
        learning_rate: the initial learning rate of Adam.
        value_weight: c; small, because squared returns are larger than log-probabilities, which matters for clipping.

    Raises:
        ArgumentError: if a value is out of range.

    Examples:
        >>> Reinforce(batch=32).learning_rate
        0.005
    """

    batch: int = 16
    value_weight: float = 0.001

    def collect(self, network: ActorCritic, envs: Envs, seed: int) -> Batch:
        """Return observations, actions, returns, advantages and masks, ``[B, T, …]``."""
        episodes = collect_episodes(envs, sampling(network.policy), self.batch, discount=self.discount, seed=seed)
        obs_t, mask_t = episodes.obs_t, episodes.mask_t
        return_t = discounted_returns(episodes.r_t, episodes.discount_t, 0.0, time_dim=1)
        with torch.no_grad():
            adv_t = standardized(return_t - network.value(obs_t), mask_t)
        return batch_of(episodes, obs_t, episodes.a_t, return_t, adv_t, mask_t)

    def loss(self, network: ActorCritic, *sample: Tensor) -> Tensor:
        """Return the loss of an episode."""
        obs_t, a_t, return_t, adv_t, mask_t = sample
        errors = torch.where(mask_t, network.value(obs_t) - return_t, 0)
        outputs = network.policy(obs_t)
        if isinstance(outputs, tuple):
            mu_t, sigma = outputs
            score = gaussian_policy_gradient_loss(mu_t, sigma, a_t, adv_t, mask_t=mask_t)
        else:
            score = reinforce_loss(outputs, a_t, adv_t, mask_t)
        return score + self.value_weight * (errors**2).sum()


def standardized(x_t: Tensor, mask_t: Tensor) -> Tensor:
    """Return the unmasked numbers standardized to mean 0 and variance 1, and 0 for masked ones, ``[B, T]``.

    Examples:
        >>> standardized(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[True, True, False]]))
        tensor([[-1.,  1.,  0.]])
    """
    real = x_t[mask_t]
    return torch.where(mask_t, (x_t - real.mean()) / real.std(correction=0).clamp(min=1e-8), 0)
