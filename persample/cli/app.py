"""The commands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from persample.cli.cases import reinforce_case, td_case
from persample.cli.compare import Comparison, calls
from persample.cli.compare import compare as run_comparison
from persample.cli.environment import version
from persample.cli.figure import save_figure
from persample.cli.report import save_report, table, writable
from persample.cli.rollout import make_envs, roll_out
from persample.cli.settings import Settings
from persample.errors import ArgumentError

app = typer.Typer(help="Per-sample gradients of PyTorch losses.", no_args_is_help=True, rich_markup_mode=None)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"persample {version('persample')}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Compute per-sample gradients of PyTorch losses."""


@app.command(
    help="Compare per-sample gradients with the naive loop on a real environment: the averaged updates of TD(0) and of "
    "REINFORCE, with time, memory, and the largest difference."
)
def compare(  # noqa: PLR0917 (typer turns every argument into an option)
    env: Annotated[str, typer.Option(help="A gymnasium environment with discrete actions.")] = "CartPole-v1",
    episodes: Annotated[int, typer.Option(help="Episodes for REINFORCE; TD(0) gets 8 transitions for each.")] = 64,
    hidden: Annotated[int, typer.Option(help="Width of the two hidden layers.")] = 64,
    engine: Annotated[str, typer.Option(help="Engine of persample: eager or loop.")] = "eager",
    seed: Annotated[int, typer.Option(help="Seed of networks, environments and actions.")] = 0,
    rounds: Annotated[int, typer.Option(help="How many times each method is timed.")] = 5,
    output: Annotated[
        Optional[Path],  # noqa: UP045 (typer reads it at run time, on Python 3.10 too)
        typer.Option(help="Directory for report.json and compare.png; nothing is written without it."),
    ] = None,
) -> None:
    """Compare per-sample gradients with the naive loop on a real environment.

    A freshly initialized policy acts in the environment. Then the averaged update of TD(0) and of REINFORCE is
    computed by the naive loop, by per_sample_grads with Mean(), and by the ordinary batch gradient.

    Args:
        env: id of the environment.
        episodes: number of episodes.
        hidden: width of the hidden layers.
        engine: persample's engine.
        seed: of everything random.
        rounds: how many times each method is timed.
        output: where to write the report.

    Raises:
        Exit: with code 2 and one line on stderr where the input cannot be used.
    """
    try:
        settings = Settings(env, episodes, hidden, engine, seed, rounds)
        directory = None if output is None else writable(output)
        comparisons = _compared(settings)
    except ArgumentError as error:
        typer.echo(f"persample: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None
    # Wide enough for the table where there is no terminal to ask.
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table(comparisons))
    if directory is not None:
        save_report(settings, comparisons, directory / "report.json")
        title = f"Averaged update on {env}, hidden width {hidden}, {engine} engine"
        save_figure(comparisons, title, directory / "compare.png")
        console.print(f"Written: {directory / 'report.json'}, {directory / 'compare.png'}", soft_wrap=True)


def _compared(settings: Settings) -> list[Comparison]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    envs = make_envs(settings)
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            tasks = {
                "transitions": progress.add_task("transitions for TD(0)", total=settings.transitions),
                "episodes": progress.add_task("episodes for REINFORCE", total=settings.episodes),
            }
            rollout = roll_out(settings, envs, lambda kind, new: progress.advance(tasks[kind], new))
            cases = (td_case(rollout), reinforce_case(rollout))
            task = progress.add_task("updates", total=len(cases) * calls(settings.rounds))
            return [
                run_comparison(case, settings.engine, settings.rounds, lambda new: progress.advance(task, new))
                for case in cases
            ]
    finally:
        envs.close()
