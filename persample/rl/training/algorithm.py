"""The interface of an algorithm: a network, its batches, and the loss of one sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from persample.errors import ArgumentError
from persample.inputs import Engine
from persample.rl.environments import Envs
from persample.rl.policies import ActorCritic, actor_critic
from persample.rl.rollouts import Episodes


class Batch(NamedTuple):
    """The data of one update.

    Attributes:
        samples: the arguments of the loss after the network, each with a leading axis of B samples.
        steps: the number of environment steps of the batch.
        returns: undiscounted returns of the episodes, for algorithms that collect whole ones.
    """

    samples: tuple[Tensor, ...]
    steps: int
    returns: Sequence[float] = ()


class Algorithm(Protocol):
    """An algorithm that learns from per-sample gradients.

    Attributes:
        num_envs: number of environments N that are stepped together.
        batch: number of samples per update B.
        learning_rate: the initial learning rate of Adam, which decreases linearly to zero.

    Examples:
        >>> from persample.rl.training import Reinforce
        >>> algorithm: Algorithm = Reinforce(batch=8)
        >>> algorithm.batch
        8
    """

    @property
    def num_envs(self) -> int: ...  # noqa: D102
    @property
    def batch(self) -> int: ...  # noqa: D102
    @property
    def learning_rate(self) -> float: ...  # noqa: D102

    def network(self, envs: Envs) -> nn.Module:
        """Make the network to train.

        Args:
            envs: N environments.

        Returns:
            A module with fresh parameters, drawn from torch's global stream.
        """

    def collect(self, network: Any, envs: Envs, seed: int) -> Batch:
        """Collect the data of one update.

        Args:
            network: the network.
            envs: N environments.
            seed: the seed of environments and policy, and so of all randomness.

        Returns:
            The batch.
        """

    def loss(self, network: Any, *sample: Tensor) -> Tensor:
        """Compute the loss of one sample.

        Args:
            network: the network.
            *sample: one row of each of the batch's ``samples``.

        Returns:
            The loss, ``[]``.
        """

    def metrics(self, network: Any) -> dict[str, float]:
        """Return further metrics of the network.

        Args:
            network: the network.

        Returns:
            Numbers by name, with the same names at every call.
        """


class Update(NamedTuple):
    """One update of the parameters, and what is shown of it.

    Attributes:
        directions: a tensor per parameter, by name; the step is minus the learning rate times these.
        losses: the losses of the samples, ``[B]``.
        norms: the norms of their gradients, ``[B]``.
    """

    directions: dict[str, Tensor]
    losses: Tensor
    norms: Tensor


@runtime_checkable
class OwnUpdate(Protocol):
    """An algorithm that turns its batch into an update by itself, in place of mean gradients and Adam."""

    def update(self, network: Any, samples: tuple[Tensor, ...], engine: Engine) -> Update:
        """Compute an update.

        Args:
            network: the network.
            samples: the batch's ``samples``.
            engine: the engine of ``per_sample_grads``.

        Returns:
            The update.
        """


def check_numbers(algorithm: object, **limits: tuple[float, float]) -> None:
    """Check that hyperparameters are within their ranges, and that counts are ints.

    Args:
        algorithm: the hyperparameters are its attributes.
        **limits: the least and the largest value of each; a least value of type int marks a count.

    Raises:
        ArgumentError: if a value is out of its range.
    """
    for name, (least, most) in limits.items():
        value = getattr(algorithm, name)
        kinds = int if isinstance(least, int) else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            expected = f"{'an int' if kinds is int else 'a number'} from {least:g} to {most:g}"
            raise ArgumentError.about(name, expected=expected, received=repr(value), fix="Choose one in that range.")


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
