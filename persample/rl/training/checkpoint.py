"""Checkpoints: the whole state between two updates in one file."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.rl.training.trainer import Trainer
from persample.utils import rng

# Settings that may change on resume: length and engine of the training.
_FREE = {"steps", "target", "engine"}
# What values of other kinds than were saved raise.
_MALFORMED = (RuntimeError, LookupError, TypeError, ValueError, AttributeError)


def save_checkpoint(trainer: Trainer, path: Path) -> None:
    """Save parameters, optimizer, random streams, counters and history. An older file is replaced atomically.

    Args:
        trainer: the trainer, between two updates.
        path: the file.

    Examples:
        >>> import tempfile
        >>> from persample.rl.training import TD0, TrainingConfig
        >>> trainer = Trainer(TrainingConfig(TD0(), "persample/RandomWalk-v0"))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save_checkpoint(trainer, Path(directory) / "checkpoint.pt")
        ...     load_checkpoint(trainer, Path(directory) / "checkpoint.pt")
        >>> trainer.steps
        0
    """
    state = {
        "config": trainer.config.record(),
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


def load_checkpoint(trainer: Trainer, path: Path) -> None:
    """Resume from a checkpoint: the following updates equal those of an uninterrupted training, bit for bit.

    Args:
        trainer: a trainer of the same settings; steps, target and engine may differ.
        path: the file.

    Raises:
        ArgumentError: if there is no checkpoint, or its settings differ.

    Examples:
        >>> from persample.rl.training import TD0, TrainingConfig
        >>> trainer = Trainer(TrainingConfig(TD0(), "persample/RandomWalk-v0"))
        >>> load_checkpoint(trainer, Path("nowhere.pt"))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        persample.errors.ArgumentError: resume: expected a checkpoint, received 'nowhere.pt' (FileNotFoundError)...
    """
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
        saved = {name: value for name, value in state["config"].items() if not isinstance(value, Tensor)}
    except (*_MALFORMED, OSError, EOFError, UnpicklingError) as error:
        fix = "Train without resuming first."
        received = f"{str(path)!r} ({type(error).__name__})"
        raise ArgumentError.about("resume", expected="a checkpoint", received=received, fix=fix) from error
    wanted = trainer.config.record()
    for name in [name for name in wanted if name not in _FREE and wanted[name] != saved.get(name)]:
        expected, received = f"{saved.get(name)!r}, as in the checkpoint", repr(wanted[name])
        fix = "Resume with the same settings; steps, target and engine may change."
        raise ArgumentError.about(name, expected=expected, received=received, fix=fix)
    try:
        _restore(trainer, state)
    except _MALFORMED as error:
        fix = "Train without resuming, with a new trainer."
        received = f"{str(path)!r} ({type(error).__name__}: {error})"
        raise ArgumentError.about("resume", expected="a whole checkpoint", received=received, fix=fix) from error


def _restore(trainer: Trainer, state: dict[str, Any]) -> None:
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
