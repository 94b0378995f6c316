"""Advantage actor-critic over whole episodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from persample.losses import advantage_actor_critic_loss
from persample.rl.check import Envs
from persample.rl.networks import ActorCritic, count_actions
from persample.rl.policies import categorical_policy
from persample.rl.rollouts import Episodes, collect_episodes
from persample.rl.training.algorithm import Batch, Episodic, batch_of


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
