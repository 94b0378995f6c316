"""``persample train``: a training run with a live display, which can be interrupted and resumed."""

from __future__ import annotations

import csv
import inspect
import math
import os
import re
import signal
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from persample.cli.output import console, save_curve, spelled, writable
from persample.errors import ArgumentError
from persample.inputs import Engine
from persample.rl.algorithms import NPG, TD0, Algorithm, Reinforce
from persample.rl.training import Trainer, evaluate, load_checkpoint, save_checkpoint

_CHECKPOINT, _METRICS, _CURVE = "checkpoint.pt", "metrics.csv", "learning_curve.png"
_EVERY = 25  # updates between checkpoints
_ROWS = 8  # updates that the display shows

train = typer.Typer(help="Train with per-sample gradients; leave metrics, a curve and a checkpoint in a directory.")


def _command(name: str, kind: type[Algorithm[Any]], what: str) -> None:
    """Add the command of one algorithm, with an option for each of its hyperparameters."""
    own = {field.name: field.default for field in fields(kind)}

    def run(
        env: Annotated[str, typer.Option(help="A gymnasium environment.")] = "CartPole-v1",
        seed: Annotated[int, typer.Option(help="Seed of network, environments and actions.")] = 0,
        steps: Annotated[int, typer.Option(help="Steps of the environments.")] = 300_000,
        engine: Annotated[Engine, typer.Option(help="Engine of persample.")] = "eager",
        target: Annotated[float, typer.Option(help="Stop when 100 episodes' average return reaches it.")] = math.inf,
        output: Annotated[
            Optional[Path],  # noqa: UP045 (typer reads it at run time, on Python 3.10 too)
            typer.Option(help="Directory of the files. Default: runs/ALGORITHM-ENV-SEED."),
        ] = None,
        resume: Annotated[bool, typer.Option("--resume", help="Go on from the directory's checkpoint.")] = False,
        **hyperparameters: Any,
    ) -> None:
        folder = Path("runs", re.sub(r"[^\w.-]", "-", f"{name}-{env}-{seed}")) if output is None else output
        trainer = Trainer(kind(**hyperparameters), env, seed=seed, steps=steps, engine=engine, target=target)
        _run(trainer, folder, resume=resume)

    signature = inspect.signature(run, eval_str=True)
    shared = list(signature.parameters.values())[:-1]
    options = [
        inspect.Parameter(
            option,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[type(default), typer.Option(spelled(option))],
        )
        for option, default in own.items()
    ]
    # typer reads both, and makes an option of each parameter.
    run.__signature__ = signature.replace(parameters=[*shared, *options])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*shared, *options)}
    train.command(name, help=f"{what} Ctrl-C stops after the update under way.")(run)


_command("td0", TD0, "The values of a fixed policy; --epsilon is how often it is random, not optimal.")
_command("reinforce", Reinforce, "REINFORCE with a learned baseline.")
_command("npg", NPG, "The natural policy gradient.")


def _run(trainer: Trainer, folder: Path, *, resume: bool) -> None:
    """Train until the end or until Ctrl-C."""
    try:
        _prepare(trainer, folder, resume=resume)
        with interruptible() as stop_asked, live_display(trainer) as redraw:
            while not (trainer.finished or stop_asked()):
                trainer.update()
                redraw()
                if len(trainer.history) % _EVERY == 0:
                    _save(trainer, folder)
            _save(trainer, folder)
    finally:
        trainer.close()
    typer.echo(f"{len(trainer.history)} updates, {trainer.steps} steps. Files: {folder}")
    if not trainer.finished:
        typer.echo("persample: interrupted; --resume goes on from here", err=True)
        raise typer.Exit(130)
    last = trainer.history[-1]
    if "value_error" in last:
        typer.echo(f"largest error of the values: {last['value_error']:.2%} of the largest value")
    if "return" in last:
        returns = evaluate(trainer.network, trainer.env, seed=trainer.seed)
        typer.echo(
            f"average return of the last 100 episodes: {last['average_return']:.1f}; "
            f"of {len(returns)} more after training: {statistics.fmean(returns):.1f}"
        )


def _prepare(trainer: Trainer, folder: Path, *, resume: bool) -> None:
    if not resume or os.path.lexists(folder):
        writable(folder, _CHECKPOINT, f"{_CHECKPOINT}.partial", _METRICS, _CURVE)
    if resume:
        load_checkpoint(trainer, folder / _CHECKPOINT)
    elif (folder / _CHECKPOINT).exists():
        fix = "Go on with it by --resume, or choose another directory."
        expected, received = "a directory without a checkpoint", repr(str(folder))
        raise ArgumentError.about("output", expected=expected, received=received, fix=fix)


def _save(trainer: Trainer, folder: Path) -> None:
    save_checkpoint(trainer, folder / _CHECKPOINT)
    if trainer.history:
        with (folder / _METRICS).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, trainer.history[0])
            writer.writeheader()
            writer.writerows(trainer.history)
        save_curve(trainer, folder / _CURVE)


@contextmanager
def live_display(trainer: Trainer) -> Iterator[Callable[[], None]]:
    """Show a progress bar above a table of the last updates, on stderr; yield what redraws them."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn())
    task = bar.add_task("steps", total=trainer.last_step)

    def redraw() -> None:
        bar.update(task, completed=min(trainer.steps, trainer.last_step))
        table, rows = Table(), trainer.history[-_ROWS:]
        for name in rows[0] if rows else ():
            table.add_column(name.replace("_", " "), justify="right")
        for row in rows:
            table.add_row(*(f"{value:,}" if isinstance(value, int) else f"{value:.4g}" for value in row.values()))
        live.update(Group(bar, table), refresh=True)

    out = console(stderr=True)
    with Live(bar, console=out, auto_refresh=False) as live:  # no thread: drawn after each update
        redraw()
        yield redraw
    if not out.is_terminal:  # rich leaves the last line open there
        out.line()


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a request to stop, which the yielded function reports; the second interrupts at once.

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
