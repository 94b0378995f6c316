"""``persample train``: a training with a live display, which can be interrupted and resumed."""

from __future__ import annotations

import csv
import math
import os
import re
import signal
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Optional, cast

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from persample.cli.figures import save_curve
from persample.cli.report import writable
from persample.errors import ArgumentError
from persample.inputs import Engine
from persample.rl.training import Trainer, TrainingConfig, evaluate, load_checkpoint, save_checkpoint
from persample.rl.training.trainer import ALGORITHMS, Row

_CHECKPOINT, _METRICS, _CURVE = "checkpoint.pt", "metrics.csv", "learning_curve.png"
_ROWS = 8  # updates that the display shows


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
    """Train with per-sample gradients; leave metrics.csv, learning_curve.png and checkpoint.pt in a directory.

    Algorithms: td0 (the values of a fixed policy), reinforce (with a learned baseline), a2c, or npg (the natural policy
    gradient). Ctrl-C stops after the update under way.
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


class TrainingFiles:
    """The files of one training, which are consistent after ``save``; ``resume`` goes on from its checkpoint."""

    def __init__(self, trainer: Trainer, directory: Path, *, resume: bool) -> None:
        self.trainer, self.directory = trainer, directory
        if not resume or os.path.lexists(directory):
            writable(directory, _CHECKPOINT, f"{_CHECKPOINT}.partial", _METRICS, _CURVE)
        if resume:
            load_checkpoint(trainer, directory / _CHECKPOINT)
        elif (directory / _CHECKPOINT).exists():
            fix = "Go on with it by --resume, or choose another directory."
            expected, received = "a directory without a checkpoint", repr(str(directory))
            raise ArgumentError.about("--output", expected=expected, received=received, fix=fix)
        # Drop rows that an interrupted training wrote after its last checkpoint.
        (directory / _METRICS).write_text("", encoding="utf-8")
        self._append(trainer.history)

    def append(self) -> None:
        """Append the last update to the metrics."""
        self._append(self.trainer.history[-1:])

    def _append(self, rows: list[dict[str, float]]) -> None:
        with (self.directory / _METRICS).open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0] if rows else ())
            if rows and not file.tell():
                writer.writeheader()
            writer.writerows(rows)

    def save(self) -> None:
        """Save the checkpoint and draw the learning curve."""
        save_checkpoint(self.trainer, self.directory / _CHECKPOINT)
        if self.trainer.history:
            save_curve(self.trainer, self.directory / _CURVE)


class Display:
    """The live display on stderr: a progress bar above a table of the last updates; ``refresh`` redraws it."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self.bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn())
        self.task = self.bar.add_task("steps", total=trainer.config.steps, completed=trainer.steps)
        # Wide enough for the table where there is no terminal to ask.
        console = Console(stderr=True, width=None if sys.stderr.isatty() else 110)
        # No thread: the display is redrawn after each update.
        self.live = Live(self._group(), console=console, auto_refresh=False)

    def __enter__(self) -> Display:
        self.live.start(refresh=True)
        return self

    def __exit__(self, *_error: object) -> None:
        self.live.stop()
        if not self.live.console.is_terminal:  # rich leaves the last line open there
            self.live.console.line()

    def refresh(self) -> None:
        """Show the last update."""
        self.bar.update(self.task, completed=min(self.trainer.steps, self.trainer.config.steps))
        self.live.update(self._group(), refresh=True)

    def _group(self) -> Group:
        return Group(self.bar, _table(self.trainer.history[-_ROWS:]))


def _table(rows: list[Row]) -> Table:
    table = Table()
    for name in rows[0] if rows else ():
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else f"{value:.4g}" for value in row.values()))
    return table


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a request to stop; the second one interrupts at once.

    Yields:
        A function that returns whether a stop was requested.

    Examples:
        >>> with interruptible() as stop_asked:
        ...     signal.raise_signal(signal.SIGINT)
        ...     stop_asked()
        True
    """
    asked = threading.Event()

    def ask(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
