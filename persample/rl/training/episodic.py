"""Algorithms that learn from whole episodes: REINFORCE with a baseline, actor-critic, natural policy gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from persample.inputs import Engine
from persample.losses import (
    advantage_actor_critic_loss,
    discounted_returns,
    gaussian_policy_gradient_loss,
    reinforce_loss,
    truncated_generalized_advantage_estimation,
)
from persample.per_sample import per_sample_grads
from persample.reductions import Dot, Loss, NaturalGradient, Norm
from persample.rl.environments import Envs
from persample.rl.policies import ActorCritic, categorical_policy, count_actions, log_prob, sampling
from persample.rl.rollouts import Episodes, collect_episodes
from persample.rl.training.algorithm import Batch, Episodic, Update, batch_of


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


@dataclass(frozen=True)
class A2C(Episodic):
    """Advantage actor-critic with generalized advantages; a sample is an episode.

    The loss is ``persample.losses.advantage_actor_critic_loss``. The last state of a truncated
    episode bootstraps, and its last step has no loss.

    Args:
        discount: γ.
        hidden: width of the two hidden layers of policy and value function.
        batch: episodes per update B.
        learning_rate: the initial learning rate of Adam.
        lambda_: λ of the advantages.
        reward_scale: factor of the rewards; the critic learns fast where values are about 1.
        value_cost: weight of the critic's squared error.
        entropy_cost: weight of the policy's entropy.

    Raises:
        ArgumentError: if a value is out of range.

    Examples:
        >>> A2C().lambda_
        0.95
    """

    lambda_: float = 0.95
    reward_scale: float = 0.01
    value_cost: float = 0.5
    entropy_cost: float = 0.001

    def network(self, envs: Envs) -> ActorCritic:
        """Return policy and value function, of environments with discrete actions."""
        count_actions(envs.single_action_space)  # the entropy of the loss is that of a categorical policy
        return super().network(envs)

    def collect(self, network: ActorCritic, envs: Envs, seed: int) -> Batch:
        """Return observations, actions, rewards, discounts and masks, ``[B, T, …]``."""
        policy = categorical_policy(network.policy)
        episodes = collect_episodes(envs, policy, self.batch, discount=self.discount, seed=seed)
        return batch_of(episodes, *episodes[:-1], bootstrapped(episodes))

    def loss(self, network: ActorCritic, *sample: Tensor) -> Tensor:
        """Return the loss of an episode."""
        obs_t, a_t, r_t, discount_t, mask_t = sample
        v_t = network.value(obs_t)
        return advantage_actor_critic_loss(
            network.policy(obs_t),
            torch.cat([v_t, v_t.new_zeros(1)]),  # read by terminated episodes only, at discount 0
            a_t,
            self.reward_scale * r_t,
            discount_t,
            self.lambda_,
            value_cost=self.value_cost,
            entropy_cost=self.entropy_cost,
            mask_t=mask_t,
        )


def bootstrapped(episodes: Episodes) -> Tensor:
    """Return the mask of all steps but the last of episodes that did not terminate, ``[E, T]``."""
    following = torch.nn.functional.pad(episodes.mask_t, (0, 1))[:, 1:]
    return episodes.mask_t & (following | (episodes.discount_t == 0))


@dataclass(frozen=True)
class NPG(Episodic):
    """The natural policy gradient (Kakade 2001) with a normalized step; a sample is a step of an episode.

    The gradients are the scores ∇log π(a|s), the targets generalized advantages, standardized over the batch: the
    direction is the ridge regression of the advantages on the scores, the compatible function approximation of Sutton
    et al. (2000). Its length gives the policy a mean KL divergence of ``max_kl`` (to second order), as in Rajeswaran et
    al., "Towards Generalization and Simplicity in Continuous Control" (2017). The value function makes a Gauss–Newton
    step towards the λ-returns: gradients are those of its outputs, targets its errors.

    Args:
        discount: γ.
        hidden: width of the two hidden layers of policy and value function.
        batch: episodes per update.
        learning_rate: the initial fraction of both steps that is made; it decreases linearly to zero.
        lambda_: λ of the advantages.
        max_kl: δ.
        damping: λ of the policy's Fisher matrix.
        value_damping: λ of the value function's Gauss–Newton matrix.

    Raises:
        ArgumentError: if a value is out of range.

    Examples:
        >>> NPG(batch=8).max_kl
        0.02
    """

    learning_rate: float = 1.0
    lambda_: float = 0.95
    max_kl: float = 0.02
    damping: float = 0.01
    value_damping: float = 0.1

    def collect(self, network: ActorCritic, envs: Envs, seed: int) -> Batch:
        """Return observations, actions, advantages and λ-returns of the steps, ``[B, …]``."""
        episodes = collect_episodes(envs, sampling(network.policy), self.batch, discount=self.discount, seed=seed)
        mask_t = bootstrapped(episodes)
        with torch.no_grad():
            v_t = network.value(episodes.obs_t)
        values = torch.nn.functional.pad(v_t, (0, 1))  # the last is read by terminated episodes only, at discount 0
        adv_t = truncated_generalized_advantage_estimation(
            episodes.r_t, episodes.discount_t, self.lambda_, values, mask_t=mask_t, time_dim=1
        )
        steps = (episodes.obs_t, episodes.a_t, standardized(adv_t, mask_t), adv_t + v_t)
        return batch_of(episodes, *(x[mask_t] for x in steps))

    def loss(self, network: ActorCritic, *sample: Tensor) -> Tensor:
        """Return −log π(a|s) of a step, the negated score function."""
        obs, a, *_ = sample
        return _negative_score(network.policy, obs, a)

    def update(self, network: ActorCritic, samples: tuple[Tensor, ...], engine: Engine) -> Update:
        """Return the natural gradient of the policy and the Gauss–Newton step of the value function."""
        obs, a, adv, returns = samples
        with torch.no_grad():
            errors = network.value(obs) - returns
        natural = NaturalGradient(self.damping, adv), Loss(), Norm()
        policy, losses, norms = per_sample_grads(_negative_score, network.policy, (obs, a), natural, engine=engine)
        products = per_sample_grads(_negative_score, network.policy, (obs, a), Dot(policy), engine=engine)
        scale = (2 * self.max_kl / products.square().mean().clamp_min(1e-12)).sqrt()
        gauss_newton = NaturalGradient(self.value_damping, errors)
        critic = per_sample_grads(_value, network.critic, (obs,), gauss_newton, engine=engine)
        directions = {f"policy.{name}": scale * x for name, x in policy.items()}
        return Update(directions | {f"critic.{name}": x for name, x in critic.items()}, losses, norms)


def _negative_score(policy: nn.Module, obs: Tensor, a: Tensor) -> Tensor:
    return -log_prob(policy, obs, a)


def _value(critic: nn.Module, obs: Tensor) -> Tensor:
    value: Tensor = critic(obs)
    return value.squeeze(-1)
