"""The base of algorithms that learn from whole episodes."""

from __future__ import annotations

from persample.rl.check import Envs
from persample.rl.networks import ActorCritic, actor_critic

# The ranges of the hyperparameters that all of them have, for ``check_numbers``.
RANGES = {"discount": (0.0, 1.0), "hidden": (1, 2**16), "batch": (1, 2**24), "learning_rate": (0.0, 1e6)}


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
        return actor_critic(envs, self.hidden)

    def metrics(self, network: ActorCritic) -> dict[str, float]:  # noqa: ARG002 (returns tell all)
        """Return no further metrics.

        Args:
            network: unused.

        Returns:
            An empty dict.
        """
        return {}
