"""The base of algorithms that learn from whole episodes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from persample.rl.check import Envs
from persample.rl.episodes import Episodes
from persample.rl.networks import ActorCritic, actor_critic
from persample.rl.training.algorithm import Batch, check_numbers

_COST, _SHARE = (0.0, 1e6), (0.0, 1.0)
_RANGES = {"discount": _SHARE, "lambda_": _SHARE, "hidden": (1, 2**16), "batch": (1, 2**24)}  # others are costs


@dataclass(frozen=True)
class Episodic:
    """An algorithm with a policy and a value function; one sample is one episode.

    Args:
        discount: γ.
        hidden: width of the two hidden layers of policy and value function.
        batch: episodes per update B.
        learning_rate: the initial learning rate.
    """

    discount: float = 0.99
    hidden: int = 64
    batch: int = 4
    learning_rate: float = 0.005

    def __post_init__(self) -> None:
        check_numbers(self, **{field.name: _RANGES.get(field.name, _COST) for field in fields(self)})

    @property
    def num_envs(self) -> int:
        """Number of environments."""
        return min(16, self.batch)

    def network(self, envs: Envs) -> ActorCritic:
        """Return policy and value function."""
        return actor_critic(envs, self.hidden)

    def metrics(self, network: ActorCritic) -> dict[str, float]:  # noqa: ARG002 (returns tell all)
        """Return no further metrics."""
        return {}


def batch_of(episodes: Episodes, *samples: Tensor) -> Batch:
    """Return the data of one update, computed from episodes."""
    return Batch(samples, int(episodes.mask_t.sum()), episodes.r_t.sum(1).tolist())
