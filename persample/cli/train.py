"""``persample train``: a training with a live display, which can be interrupted and resumed."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Optional, cast

import typer

from persample.cli.interrupt import interruptible
from persample.cli.live import Display
from persample.cli.training_files import TrainingFiles
from persample.errors import ArgumentError
from persample.inputs import Engine
from persample.rl.training import Trainer, TrainingConfig, evaluate
from persample.rl.training.config import ALGORITHMS

HELP = (
    "Train with per-sample gradients: td0 (the values of a fixed policy), reinforce (with a learned baseline), a2c, or "
    "npg (the natural policy gradient). Leaves metrics.csv, learning_curve.png and checkpoint.pt in a directory. "
    "Ctrl-C stops after the update under way."
)


def train(  # noqa: PLR0917 (typer turns every argument into an option)
    algorithm: Annotated[str, typer.Argument(help="td0, reinforce, a2c or npg.")],
    env: Annotated[
        str, typer.Option(help="A gymnasium environment; with continuous actions for reinforce and npg.")
    ] = "CartPole-v1",
    seed: Annotated[int, typer.Option(help="Seed of network, environments and actions.")] = 0,
    steps: Annotated[int, typer.Option(help="Steps of the environments.")] = 300_000,
    reduce: Annotated[str, typer.Option(help="How gradients become an update: mean or clipped.")] = "mean",
    max_norm: Annotated[float, typer.Option(help="Norm that clipped gradients keep at most.")] = 100.0,
    engine: Annotated[str, typer.Option(help="Engine of persample: eager, compiled or loop.")] = "eager",
    target: Annotated[float, typer.Option(help="Stop when 100 episodes' average return reaches it.")] = math.inf,
    learning_rate: Annotated[Optional[float], typer.Option(help="Adam's or npg's, falling linearly to 0.")] = None,  # noqa: UP045
    discount: Annotated[Optional[float], typer.Option(help="Discount γ.")] = None,  # noqa: UP045
    hidden: Annotated[Optional[int], typer.Option(help="Width of two hidden layers; td0: 0 is linear.")] = None,  # noqa: UP045
    batch: Annotated[Optional[int], typer.Option(help="Episodes (td0: transitions) per update.")] = None,  # noqa: UP045
    lambda_: Annotated[Optional[float], typer.Option("--lambda", help="a2c, npg: λ of the advantages.")] = None,  # noqa: UP045
    epsilon: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="td0: how often the policy is random, not optimal; 1 without a known table."),
    ] = None,
    max_kl: Annotated[Optional[float], typer.Option(help="npg: KL divergence of a full step.")] = None,  # noqa: UP045
    damping: Annotated[Optional[float], typer.Option(help="npg: λ of the policy's Fisher matrix.")] = None,  # noqa: UP045
    value_damping: Annotated[Optional[float], typer.Option(help="npg: λ of the values' Gauss–Newton matrix.")] = None,  # noqa: UP045
    checkpoint_every: Annotated[int, typer.Option(help="Updates between checkpoints.")] = 25,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Directory of the files. Default: runs/ALGORITHM-ENV-SEED."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the directory's checkpoint.")] = False,
) -> None:
    """Train with a live display, and write metrics, a figure and a checkpoint.

    Args:
        algorithm: "td0", "reinforce", "a2c" or "npg".
        env: the id of the environment.
        seed: the seed of network, environments and actions.
        steps: the number of environment steps.
        reduce: "mean" or "clipped".
        max_norm: the bound of "clipped".
        engine: the engine of persample.
        target: the average return that ends the training.
        learning_rate: the initial learning rate of Adam.
        discount: γ.
        hidden: width of the hidden layers.
        batch: samples per update.
        lambda_: the λ of a2c's and npg's advantages.
        epsilon: the ε of td0's policy.
        max_kl: the δ of npg's steps.
        damping: the λ of npg's Fisher matrix.
        value_damping: the λ of npg's Gauss–Newton matrix.
        checkpoint_every: updates between checkpoints.
        output: the directory of the files.
        resume: whether to resume from the checkpoint in ``output``.

    Raises:
        ArgumentError: if an option is invalid.
        Exit: with code 130 after an interrupt.
    """
    if checkpoint_every < 1:
        expected, received = "a positive integer", str(checkpoint_every)
        raise ArgumentError.about("--checkpoint-every", expected=expected, received=received, fix="Use 1 or more.")
    own = {"learning_rate": learning_rate, "discount": discount, "hidden": hidden, "batch": batch}
    own |= {"lambda_": lambda_, "epsilon": epsilon}
    own |= {"max_kl": max_kl, "damping": damping, "value_damping": value_damping}
    directory = Path("runs", re.sub(r"[^\w.-]", "-", f"{algorithm}-{env}-{seed}")) if output is None else output
    with _named_as_options():
        known = cast("Engine", engine)  # TrainingConfig checks it
        config = TrainingConfig(_algorithm(algorithm, own), env, seed, steps, reduce, max_norm, known, target)
        trainer = Trainer(config)
        try:
            files = TrainingFiles(trainer, directory, resume=resume)
            stopped = _run(trainer, files, checkpoint_every)
        finally:
            trainer.close()
    typer.echo(f"{len(trainer.history)} updates, {trainer.steps} steps. Files: {directory}")
    if stopped:
        typer.echo("persample: interrupted; --resume goes on from here", err=True)
        raise typer.Exit(130)
    _report(trainer)


def _algorithm(name: str, own: dict[str, Any]) -> Any:
    if name not in ALGORITHMS:
        expected = " or ".join(map(repr, ALGORITHMS))
        raise ArgumentError.about("algorithm", expected=expected, received=repr(name), fix="Pick one of them.")
    kind = ALGORITHMS[name]
    given = {option: value for option, value in own.items() if value is not None}
    for option in given.keys() - {field.name for field in fields(kind)}:
        expected = f"nothing, for {name} has none"
        raise ArgumentError.about(option, expected=expected, received=f"{given[option]}", fix="Leave it out.")
    return kind(**given)


def _run(trainer: Trainer, files: TrainingFiles, checkpoint_every: int) -> bool:
    """Train until the end or until Ctrl-C.

    Returns:
        Whether Ctrl-C ended the training.
    """
    with interruptible() as stop_asked, Display(trainer) as display:
        while not (trainer.finished or stop_asked()):
            trainer.update()
            files.append()
            display.refresh()
            if len(trainer.history) % checkpoint_every == 0:
                files.save()
        files.save()
        return not trainer.finished


def _report(trainer: Trainer) -> None:
    last = trainer.history[-1]
    if "value_error" in last:
        typer.echo(f"largest error of the values: {last['value_error']:.2%} of the largest value")
    if "return" in last:
        returns = evaluate(trainer.network, trainer.config.env, seed=trainer.config.seed)
        typer.echo(
            f"average return of the last 100 episodes: {last['average_return']:.1f}; "
            f"of {len(returns)} more after training: {statistics.fmean(returns):.1f}"
        )


@contextmanager
def _named_as_options() -> Iterator[None]:
    """Spell arguments in errors as command-line options: ``--learning-rate`` for ``learning_rate``."""
    try:
        yield
    except NotImplementedError as error:
        raise ArgumentError(str(error)) from error
    except ArgumentError as error:
        name, separator, rest = str(error).partition(": ")
        plain = name.isidentifier() and name != "algorithm"
        option = f"--{name.rstrip('_').replace('_', '-')}" if plain else name
        raise ArgumentError(f"{option}{separator}{rest}") from error
