"""A small trainer: collect, differentiate sample by sample, step; and its checkpoints."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from persample import inputs
from persample.errors import ArgumentError
from persample.inputs import Engine
from persample.inputs.params import set_grads
from persample.rl.algorithms import NPG, TD0, Algorithm, Batch, Reinforce, Update
from persample.rl.environments import check_number, make_envs
from persample.rl.rollouts import collect_episodes
from persample.utils import rng
from persample.utils.trees import Tree

__all__ = [
    "NPG",
    "TD0",
    "Algorithm",
    "Batch",
    "Reinforce",
    "Trainer",
    "Update",
    "evaluate",
    "load_checkpoint",
    "save_checkpoint",
]

Row = dict[str, float]


# Gymnasium's thresholds apply to averages over this number of episodes.
EPISODES = 100


class Trainer:
    """A training run.

    Update k resets the environments with a seed derived from (seed, k). No state of the environments outlives an
    update, so that a checkpoint between two updates holds the whole state.

    Args:
        algorithm: ``TD0()``, ``Reinforce()``, ``NPG()``, or an ``Algorithm`` of your own.
        env: id of the environment.
        seed: the seed of network, environments and actions.
        steps: the number of environment steps. The update that reaches it is the last, and the learning rate decreases
            linearly to zero until then.
        engine: the engine of ``per_sample_grads``.
        target: the average return of 100 episodes that ends the training.

    Raises:
        ArgumentError: if an argument is invalid, or the environment is unknown or does not suit the algorithm.

    Examples:
        >>> from persample.rl.training import TD0, Trainer
        >>> trainer = Trainer(TD0(discount=1.0, learning_rate=0.05), "persample/RandomWalk-v0", steps=50_000)
        >>> while not trainer.finished:
        ...     row = trainer.update()
        >>> row["value_error"] < 0.05
        True
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        env: str = "CartPole-v1",
        *,
        seed: int = 0,
        steps: int = 300_000,
        engine: Engine = "eager",
        target: float = math.inf,
    ) -> None:
        check_number("seed", seed, 0, 2**63 - 1)
        check_number("steps", steps, 1, 2**63 - 1)
        check_number("target", target, -math.inf)
        inputs.check_options(engine=engine, randomness="error", chunk_size=None)
        self.algorithm, self.env, self.seed, self.last_step = algorithm, env, seed, steps
        self.engine, self.target = engine, target
        self.envs = make_envs(env, algorithm.num_envs)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self.network = algorithm.network(self.envs)
        except ArgumentError:
            self.envs.close()
            raise
        self.optimizer = type(algorithm).optimizer(self.network.parameters(), lr=algorithm.learning_rate)
        self.steps = 0
        self.history: list[Row] = []
        self.returns: list[float] = []

    @property
    def config(self) -> dict[str, str | int]:
        """What a resumed run must share: algorithm with hyperparameters, environment and seed."""
        return {"algorithm": repr(self.algorithm), "env": self.env, "seed": self.seed}

    @property
    def solved(self) -> bool:
        """Whether the average return of the last 100 episodes has reached the target."""
        return len(self.returns) >= EPISODES and statistics.fmean(self.returns) >= self.target

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return self.solved or self.steps >= self.last_step

    def update(self) -> Row:
        """Make one update of the parameters; return its metrics by name, also the last row of ``history``."""
        seed = np.random.SeedSequence([self.seed, len(self.history)]).generate_state(1, np.uint64)[0] >> 1
        batch = self.algorithm.collect(self.network, self.envs, int(seed))
        update = self.algorithm.update(self.network, batch.samples, self.engine)
        set_grads(self.network, update.directions)
        for group in self.optimizer.param_groups:
            group["lr"] = self.algorithm.learning_rate * max(0.0, 1 - self.steps / self.last_step)
        self.optimizer.step()
        self.steps += batch.steps
        self.returns = [*self.returns, *batch.returns][-EPISODES:]
        self.history.append(self._row(batch, update.losses, update.norms))
        return self.history[-1]

    def _row(self, batch: Batch, losses: Tensor, norms: Tensor) -> Row:
        row: Row = {"update": len(self.history) + 1, "steps": self.steps, "loss": losses.mean().item()}
        if batch.returns:
            row |= {"return": statistics.fmean(batch.returns), "average_return": statistics.fmean(self.returns)}
        row |= self.algorithm.metrics(self.network)
        row |= {"median_norm": norms.median().item(), "max_norm": norms.max().item()}
        bound = getattr(self.algorithm, "max_norm", math.inf)
        if bound < math.inf:
            row["clipped"] = (norms > bound).float().mean().item()
        return row

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()


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
        >>> network = ActorCritic(make_envs("CartPole-v1", 1), 8)
        >>> min(evaluate(network, "CartPole-v1", 3, seed=0)) > 0
        True
    """
    envs = make_envs(env, min(16, num_episodes))
    try:
        episodes = collect_episodes(envs, network.get_submodule("policy"), num_episodes, seed=seed)
    finally:
        envs.close()
    returns: list[float] = episodes.r_t.sum(1).tolist()
    return returns


def save_checkpoint(trainer: Trainer, path: Path) -> None:
    """Save parameters, optimizer, random streams, counters and history. An older file is replaced atomically.

    Args:
        trainer: the trainer, between two updates.
        path: the file.

    Examples:
        >>> import tempfile
        >>> trainer = Trainer(TD0(), "persample/RandomWalk-v0")
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save_checkpoint(trainer, Path(directory) / "checkpoint.pt")
        ...     load_checkpoint(trainer, Path(directory) / "checkpoint.pt")
        >>> trainer.steps
        0
    """
    state = {
        "config": trainer.config,
        "network": trainer.network.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "streams": rng.snapshot(),
        "steps": trainer.steps,
        "history": trainer.history,
        "returns": trainer.returns,
    }
    partial = path.with_name(f"{path.name}.partial")
    torch.save(state, partial)
    partial.replace(path)


# The exceptions that values of other kinds than were saved raise.
_MALFORMED = (RuntimeError, LookupError, TypeError, ValueError, AttributeError)


def load_checkpoint(trainer: Trainer, path: Path) -> None:
    """Resume from a checkpoint: the following updates equal those of an uninterrupted run, bit for bit.

    Args:
        trainer: a trainer of the same algorithm, environment and seed; steps, target and engine may differ.
        path: the file.

    Raises:
        ArgumentError: if there is no checkpoint, or its settings differ.

    Examples:
        >>> trainer = Trainer(TD0(), "persample/RandomWalk-v0")
        >>> load_checkpoint(trainer, Path("nowhere.pt"))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        persample.errors.ArgumentError: resume: expected a checkpoint, received 'nowhere.pt' (FileNotFoundError)...
    """
    try:
        state: Tree = torch.load(path, weights_only=True)
        saved = {name: value for name, value in state["config"].items() if not isinstance(value, Tensor)}
    except (*_MALFORMED, OSError, EOFError, UnpicklingError) as error:
        fix = "Train without resuming first."
        received = f"{str(path)!r} ({type(error).__name__})"
        raise ArgumentError.about("resume", expected="a checkpoint", received=received, fix=fix) from error
    for name, wanted in trainer.config.items():
        if wanted != saved.get(name):
            expected, received = f"{saved.get(name)!r}, as in the checkpoint", repr(wanted)
            fix = "Resume with the same settings; steps, target and engine may change."
            raise ArgumentError.about(name, expected=expected, received=received, fix=fix)
    try:
        _restore(trainer, state)
    except _MALFORMED as error:
        fix = "Train without resuming, with a new trainer."
        received = f"{str(path)!r} ({type(error).__name__}: {error})"
        raise ArgumentError.about("resume", expected="a whole checkpoint", received=received, fix=fix) from error


def _restore(trainer: Trainer, state: Tree) -> None:
    steps, history, returns = state["steps"], list(state["history"]), list(state["returns"])
    numbers = [steps, *returns, *(value for row in history for value in row.values())]
    if type(steps) is not int or not all(isinstance(x, int | float) for x in numbers):
        raise TypeError("steps, returns and history are no numbers")
    trainer.network.load_state_dict(state["network"])
    own = trainer.optimizer.state_dict()  # its settings are those of the trainer
    trainer.optimizer.load_state_dict({**own, "state": state["optimizer"]["state"]})
    for p, held in trainer.optimizer.state.items():
        if held.keys() != {"step", "exp_avg", "exp_avg_sq"} or any(
            x.ndim and x.shape != p.shape for x in held.values()
        ):
            raise ValueError(f"the optimizer's state is not Adam's, of a parameter of shape {list(p.shape)}")
    rng.rewind(state["streams"])
    trainer.steps, trainer.history, trainer.returns = steps, history, returns
