"""The arguments of ``persample compare``, checked."""

from __future__ import annotations

from dataclasses import dataclass

from persample import inputs
from persample.errors import ArgumentError
from persample.inputs import Engine


@dataclass(frozen=True)
class Settings:
    """The settings of a comparison.

    Args:
        env: the id of a gymnasium environment.
        episodes: number of episodes E for REINFORCE; TD(0) gets 8 transitions for each.
        hidden: width of the two hidden layers.
        engine: the engine of persample.
        seed: the seed of networks, environments and actions.
        rounds: how many times each method is timed.

    Raises:
        ArgumentError: if a value is invalid; the message names the option.
    """

    env: str = "CartPole-v1"
    episodes: int = 64
    hidden: int = 64
    engine: Engine = "eager"
    seed: int = 0
    rounds: int = 5

    def __post_init__(self) -> None:
        for name in ("episodes", "hidden", "rounds"):
            if (count := getattr(self, name)) < 1:
                expected, received = "a positive integer", str(count)
                raise ArgumentError.about(f"--{name}", expected=expected, received=received, fix="Use 1 or more.")
        if not 0 <= self.seed < 2**63:
            fix = "Any other number will do."
            raise ArgumentError.about("--seed", expected="0 … 2⁶³ − 1", received=str(self.seed), fix=fix)
        inputs.check_options(engine=self.engine, randomness="error", chunk_size=None)

    @property
    def transitions(self) -> int:
        """Number of transitions for TD(0)."""
        return 8 * self.episodes
