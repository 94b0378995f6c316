"""The settings of a training, and its loop: collect, differentiate sample by sample, step."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from persample import inputs
from persample.errors import ArgumentError
from persample.inputs import Engine
from persample.inputs.params import set_grads
from persample.per_sample import per_sample_grads
from persample.reductions import ClippedMean, Loss, Mean, Norm, Reduction
from persample.rl.environments import make_envs
from persample.rl.policies import sampling
from persample.rl.rollouts import collect_episodes
from persample.rl.training.algorithm import Algorithm, Batch, OwnUpdate, Update, check_numbers
from persample.rl.training.episodic import A2C, NPG, Reinforce
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


Row = dict[str, float]

# Gymnasium's thresholds apply to averages over this number of episodes.
EPISODES = 100


class Trainer:
    """A running training.

    Update k resets the environments with a seed derived from (seed, k). No state of the environments outlives an
    update, so that a checkpoint between two updates holds the whole state.

    Args:
        config: the settings.

    Raises:
        ArgumentError: if the environment is unknown or does not suit the algorithm.

    Examples:
        >>> from persample.rl.training import TD0, Trainer, TrainingConfig
        >>> algorithm = TD0(discount=1.0, learning_rate=0.05)
        >>> trainer = Trainer(TrainingConfig(algorithm, "persample/RandomWalk-v0", steps=50_000))
        >>> while not trainer.finished:
        ...     row = trainer.update()
        >>> row["value_error"] < 0.05
        True
    """

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        try:
            self.envs = make_envs(config.env, config.algorithm.num_envs)
        except ArgumentError as error:
            raise ArgumentError(str(error).replace("env_id", "env", 1)) from error
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.seed)
                self.network = config.algorithm.network(self.envs)
        except ArgumentError:
            self.envs.close()
            raise
        kind = torch.optim.SGD if isinstance(config.algorithm, OwnUpdate) else torch.optim.Adam
        self.optimizer = kind(self.network.parameters(), lr=config.algorithm.learning_rate)
        self.steps = 0
        self.history: list[Row] = []
        self.returns: list[float] = []

    @property
    def threshold(self) -> float:
        """The average return at which gymnasium calls the environment solved; ∞ if it defines none."""
        threshold = None if self.envs.spec is None else self.envs.spec.reward_threshold
        return math.inf if threshold is None else float(threshold)

    @property
    def solved(self) -> bool:
        """Whether the average return of the last 100 episodes has reached the target."""
        return len(self.returns) >= EPISODES and statistics.fmean(self.returns) >= self.config.target

    @property
    def finished(self) -> bool:
        """Whether the training has ended."""
        return self.solved or self.steps >= self.config.steps

    def update(self) -> Row:
        """Make one update of the parameters.

        Returns:
            The metrics of the update by name, also the last row of ``history``.
        """
        algorithm, config = self.config.algorithm, self.config
        batch = algorithm.collect(self.network, self.envs, self._seed())
        update = self._update(batch.samples)
        set_grads(self.network, update.directions)
        for group in self.optimizer.param_groups:
            group["lr"] = algorithm.learning_rate * max(0.0, 1 - self.steps / config.steps)
        self.optimizer.step()
        self.steps += batch.steps
        self.returns = [*self.returns, *batch.returns][-EPISODES:]
        self.history.append(self._row(batch, update.losses, update.norms))
        return self.history[-1]

    def _update(self, samples: tuple[Tensor, ...]) -> Update:
        algorithm, config = self.config.algorithm, self.config
        if isinstance(algorithm, OwnUpdate):
            return algorithm.update(self.network, samples, config.engine)
        wanted = (config.reduction, Loss(), Norm())
        return Update(*per_sample_grads(algorithm.loss, self.network, samples, wanted, engine=config.engine))

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()

    def _seed(self) -> int:
        return int(np.random.SeedSequence([self.config.seed, len(self.history)]).generate_state(1, np.uint64)[0] >> 1)

    def _row(self, batch: Batch, losses: Tensor, norms: Tensor) -> Row:
        row: dict[str, Any] = {"update": len(self.history) + 1, "steps": self.steps, "loss": losses.mean()}
        if batch.returns:
            row |= {"return": statistics.fmean(batch.returns), "average_return": statistics.fmean(self.returns)}
        row |= self.config.algorithm.metrics(self.network)
        row |= {"median_norm": norms.median(), "max_norm": norms.max()}
        if self.config.reduce == "clipped":
            row["clipped"] = (norms > self.config.max_norm).float().mean()
        return {name: value.item() if isinstance(value, Tensor) else value for name, value in row.items()}


def evaluate(network: nn.Module, env: str, num_episodes: int = 100, *, seed: int) -> list[float]:
    """Play episodes with actions sampled from a policy.

    Args:
        network: its part ``policy`` maps observations to logits, or to means and deviations, as in ``ActorCritic``.
        env: id of the environment.
        num_episodes: number of episodes E.
        seed: the seed of environments and actions.

    Returns:
        Undiscounted returns, ``E`` of them.

    Examples:
        >>> from persample.rl.policies import ActorCritic
        >>> envs = make_envs("CartPole-v1", 1)
        >>> network = ActorCritic(envs.single_observation_space, 8, 2)
        >>> min(evaluate(network, "CartPole-v1", 3, seed=0)) > 0
        True
    """
    envs = make_envs(env, min(16, num_episodes))
    try:
        episodes = collect_episodes(envs, sampling(network.get_submodule("policy")), num_episodes, seed=seed)
    finally:
        envs.close()
    returns: list[float] = episodes.r_t.sum(1).tolist()
    return returns
