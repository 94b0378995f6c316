"""The settings of a training."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from persample import inputs
from persample.errors import ArgumentError
from persample.inputs import Engine
from persample.reductions import ClippedMean, Mean, Reduction
from persample.rl.training.a2c import A2C
from persample.rl.training.algorithm import Algorithm, OwnUpdate, check_numbers
from persample.rl.training.npg import NPG
from persample.rl.training.reinforce import Reinforce
from persample.rl.training.td0 import TD0

ALGORITHMS: dict[str, Any] = {"td0": TD0, "reinforce": Reinforce, "a2c": A2C, "npg": NPG}


@dataclass(frozen=True)
class TrainingConfig:
    """The settings of a training.

    Args:
        algorithm: ``TD0()``, ``Reinforce()``, ``A2C()``, ``NPG()``, or an algorithm of your own.
        env: id of the environment.
        seed: the seed of network, environments and actions.
        steps: the number of environment steps. The update that reaches it is the last, and the learning rate decreases
            linearly to zero until then.
        reduce: "mean" or "clipped", the mean of per-sample gradients clipped to ``max_norm``.
        max_norm: the bound C of the norms.
        engine: the engine of ``per_sample_grads``.
        target: the average return of 100 episodes that ends the training.

    Raises:
        ArgumentError: if an argument is invalid; the message names it and the reason.

    Examples:
        >>> TrainingConfig(Reinforce(), reduce="clipped").reduction
        ClippedMean(max_norm=100.0, per_param=False)
    """

    algorithm: Algorithm
    env: str = "CartPole-v1"
    seed: int = 0
    steps: int = 300_000
    reduce: str = "mean"
    max_norm: float = 100.0
    engine: Engine = "eager"
    target: float = math.inf

    def __post_init__(self) -> None:
        check_numbers(self, seed=(0, 2**63 - 1), steps=(1, 2**63 - 1), max_norm=(0.0, math.inf))
        if self.reduce not in {"mean", "clipped"}:
            expected = "'mean' or 'clipped'"
            raise ArgumentError.about("reduce", expected=expected, received=repr(self.reduce), fix="Pick one of them.")
        if math.isnan(self.target):
            fix = "inf trains until the steps are done."
            raise ArgumentError.about("target", expected="a number", received="nan", fix=fix)
        if isinstance(self.algorithm, OwnUpdate) and self.reduce != "mean":
            expected = f"'mean', for {type(self.algorithm).__name__.lower()} makes updates of its own"
            fix = "Leave it out."
            raise ArgumentError.about("reduce", expected=expected, received=repr(self.reduce), fix=fix)
        inputs.check_options(engine=self.engine, randomness="error", chunk_size=None)

    @property
    def reduction(self) -> Reduction:
        """The reduction of the gradients to an update."""
        return ClippedMean(self.max_norm) if self.reduce == "clipped" else Mean()

    def record(self) -> dict[str, Any]:
        """Return the settings as plain values.

        Returns:
            Numbers and strings by name, including the algorithm's.
        """
        own: Any = self.algorithm
        settings = {name: value for name, value in vars(self).items() if name != "algorithm"}
        return {"algorithm": type(own).__name__, **settings, **asdict(own)}
