"""The base of algorithms that learn from whole episodes."""

from __future__ import annotations

from persample.rl.check import Envs
from persample.rl.networks import ActorCritic, count_actions


class Episodic:
    """An algorithm with a policy and a value function; one sample is one episode.

    Attributes:
        hidden: width of the two hidden layers of policy and value function.
        batch: episodes per update B.
    """

    hidden: int
    batch: int

    @property
    def num_envs(self) -> int:
        """Number of environments."""
        return min(16, self.batch)

    def network(self, envs: Envs) -> ActorCritic:
        """Make policy and value function.

        Args:
            envs: N environments.

        Returns:
            The module.
        """
        return ActorCritic(envs.single_observation_space, self.hidden, count_actions(envs.single_action_space))

    def metrics(self, network: ActorCritic) -> dict[str, float]:  # noqa: ARG002 (returns tell all)
        """Return no further metrics.

        Args:
            network: unused.

        Returns:
            An empty dict.
        """
        return {}
