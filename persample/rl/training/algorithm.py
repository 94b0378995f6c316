"""What an algorithm is: a network, batches of data for it, and the loss of one sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from persample.errors import ArgumentError
from persample.rl.check import Envs


class Batch(NamedTuple):
    """The data of one update.

    Attributes:
        samples: the arguments of the loss after the network, each with a leading axis of B samples.
        steps: how many steps of the environments they took.
        returns: undiscounted returns of the episodes, for algorithms that collect whole ones.
    """

    samples: tuple[Tensor, ...]
    steps: int
    returns: Sequence[float] = ()


class Algorithm(Protocol):
    """Anything that learns from per-sample gradients.

    Attributes:
        num_envs: number of environments N that are stepped together.
        batch: number of samples per update B.
        learning_rate: of Adam; it falls linearly to zero.

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
        """Make what is trained.

        Args:
            envs: N environments.

        Returns:
            A module with fresh parameters, drawn from torch's global stream.
        """

    def collect(self, network: Any, envs: Envs, seed: int) -> Batch:
        """Collect the data of one update.

        Args:
            network: what is trained.
            envs: N environments.
            seed: of environments and policy; all randomness.

        Returns:
            The batch.
        """

    def loss(self, network: Any, *sample: Tensor) -> Tensor:
        """Compute the loss of one sample.

        Args:
            network: what is trained.
            *sample: a row of each of the batch's ``samples``.

        Returns:
            The loss, ``[]``.
        """

    def metrics(self, network: Any) -> dict[str, float]:
        """Measure what the gradients do not tell.

        Args:
            network: what is trained.

        Returns:
            Numbers by name, the same names every time.
        """


def check_numbers(algorithm: object, **limits: tuple[float, float]) -> None:
    """Refuse hyperparameters out of range, and counts that are no ints.

    Args:
        algorithm: it has them as attributes.
        **limits: the least and the largest value of each; an int as the least one is for a count.

    Raises:
        ArgumentError: if one is out of its range.
    """
    for name, (least, most) in limits.items():
        value = getattr(algorithm, name)
        kinds = int if isinstance(least, int) else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            expected = f"{'an int' if kinds is int else 'a number'} from {least:g} to {most:g}"
            raise ArgumentError.about(name, expected=expected, received=repr(value), fix="Choose one in that range.")
