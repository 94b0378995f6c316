"""The natural policy gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from persample.inputs import Engine
from persample.losses import truncated_generalized_advantage_estimation
from persample.per_sample import per_sample_grads
from persample.reductions import Dot, Loss, NaturalGradient, Norm
from persample.rl.check import Envs
from persample.rl.networks import ActorCritic, log_prob, sampling
from persample.rl.rollouts import collect_episodes
from persample.rl.training.a2c import bootstrapped
from persample.rl.training.algorithm import Batch, Episodic, Update, batch_of
from persample.rl.training.reinforce import standardized


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
