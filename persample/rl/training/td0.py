"""TD(0): evaluation of a fixed policy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from persample.errors import ArgumentError
from persample.losses import td_loss
from persample.rl.environments import Envs
from persample.rl.policies import count_actions, linear, mlp
from persample.rl.rollouts import collect_transitions
from persample.rl.tabular import exact_values, optimal_actions, transition_table
from persample.rl.training.algorithm import Batch, check_numbers


class Evaluation(nn.Module):
    """A value function and the policy that it evaluates.

    Args:
        value: from observations to ``[*, 1]``.
        probabilities: π(a|s), ``[S, A]``, or ``[1, A]`` for a policy that is equal in all states.
        exact: the policy's exact values, ``[S]``; ``[0]`` if they are unknown.
    """

    probabilities: Tensor
    exact: Tensor

    def __init__(self, value: nn.Module, probabilities: Tensor, exact: Tensor) -> None:
        super().__init__()
        self.value = value
        self.register_buffer("probabilities", probabilities)
        self.register_buffer("exact", exact)

    def forward(self, observations: Tensor) -> Tensor:
        """Return values, ``[*]``, of observations, ``[*, *obs]``."""
        return self.value(observations).squeeze(-1)

    def policy(self, observations: Tensor, generator: torch.Generator) -> Tensor:
        """Return random actions, ``[N]``, at observations, ``[N, *obs]``."""
        everywhere = len(self.probabilities) == 1
        rows = self.probabilities.expand(len(observations), -1) if everywhere else self.probabilities[observations]
        return torch.multinomial(rows, 1, generator=generator).squeeze(1)


@dataclass(frozen=True)
class TD0:
    """Semi-gradient TD(0) for the values of a fixed policy; a sample is a transition.

    The policy takes a random action with probability ε, otherwise the optimal action. The optimal action and the exact
    values are known if the environment has a transition table. Every update collects a new rollout of ``batch``
    transitions, beginning at start states.

    Args:
        discount: γ.
        epsilon: ε; 1 is the uniformly random policy.
        hidden: width of two hidden layers; 0 gives a linear function (for Discrete observations, a table).
        batch: transitions per update B.
        learning_rate: the initial learning rate of Adam.

    Raises:
        ArgumentError: if a value is out of range.

    Examples:
        >>> TD0(epsilon=0.1).batch
        512
    """

    discount: float = 0.99
    epsilon: float = 1.0
    hidden: int = 0
    batch: int = 512
    learning_rate: float = 0.02

    def __post_init__(self) -> None:
        check_numbers(
            self, discount=(0.0, 1.0), epsilon=(0.0, 1.0), hidden=(0, 2**16), batch=(1, 2**24), learning_rate=(0.0, 1e6)
        )

    @property
    def num_envs(self) -> int:
        """Number of environments, limited to allow rollouts of 32 steps: shorter ones would rarely end an episode."""
        return min(16, max(1, self.batch // 32))

    def network(self, envs: Envs) -> Evaluation:
        """Return the value function, with the policy that it evaluates."""
        space, table = envs.single_observation_space, transition_table(envs)
        actions = count_actions(envs.single_action_space)
        probabilities = torch.full((1, actions), 1 / actions)
        exact = torch.empty(0)
        if table is not None:
            greedy = torch.nn.functional.one_hot(optimal_actions(table, self.discount), actions)
            probabilities = self.epsilon * probabilities + (1 - self.epsilon) * greedy
            exact = exact_values(table, probabilities, self.discount)
        elif self.epsilon < 1:
            fix = "Use 1, the uniformly random policy, or one of gymnasium's toy environments."
            expected, received = "1 in environments without a table of transitions", f"{self.epsilon:g}"
            raise ArgumentError.about("epsilon", expected=expected, received=received, fix=fix)
        value = mlp(space, self.hidden, 1) if self.hidden else linear(space)
        return Evaluation(value, probabilities, exact)

    def collect(self, network: Evaluation, envs: Envs, seed: int) -> Batch:
        """Return transitions (s, r, γ, s′) of the policy."""
        rollout = collect_transitions(envs, network.policy, self.batch, discount=self.discount, seed=seed)
        return Batch((rollout.obs_tm1, rollout.r_t, rollout.discount_t, rollout.obs_t), self.batch)

    def loss(self, network: Evaluation, *sample: Tensor) -> Tensor:
        """Return the squared TD error."""
        obs_tm1, r_t, discount_t, obs_t = sample
        return td_loss(network(obs_tm1), r_t, discount_t, network(obs_t))

    def metrics(self, network: Evaluation) -> dict[str, float]:
        """Return ``value_error``, max |v − v_π| / max |v_π| over the states, if the exact values v_π are known.

        It is without the division if all v_π are 0.
        """
        if not len(network.exact):
            return {}
        with torch.no_grad():
            error = network(torch.arange(len(network.exact))) - network.exact
        largest = float(network.exact.abs().max())
        return {"value_error": float(error.abs().max()) / (largest or 1.0)}
