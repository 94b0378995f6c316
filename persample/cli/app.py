"""The commands; ``compare``, and ``baird``, the figure of Baird's counterexample."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Optional, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer.core import TyperGroup

from persample.cli import stats_command, train_command
from persample.cli.cases import Settings, make_envs, reinforce_case, roll_out, td_case
from persample.cli.figures import BAIRD, save_baird, save_comparison
from persample.cli.measure import version
from persample.cli.report import Comparison, calls, notes, save_report, table, writable
from persample.cli.report import compare as run_comparison
from persample.errors import ArgumentError
from persample.inputs import Engine
from persample.rl.baird import STEP_SIZES, baird_run


def baird(
    updates: Annotated[int, typer.Option(help="Updates of 32 transitions each.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the transitions.")] = 0,
    output: Annotated[Path, typer.Option(help="The PNG file.")] = Path("baird.png"),
) -> None:
    """Draw Baird's counterexample: semi-gradient TD(0) diverges, GTD2 and TDC do not."""
    if updates < 1:
        fix = "Use 1 or more."
        raise ArgumentError.about("--updates", expected="a positive integer", received=str(updates), fix=fix)
    if output.suffix.lower() != ".png":
        fix = "Name it like errors.png."
        raise ArgumentError.about("--output", expected="a .png file", received=str(output), fix=fix)
    writable(output.parent, output.name)
    runs = {method: baird_run(method, updates, seed=seed) for method in STEP_SIZES}
    for method, run in runs.items():
        values, bellman = run.value_error[-1], run.bellman_error[-1]
        typer.echo(f"{BAIRD[method][0]}: value error {values:.3g}, Bellman error {bellman:.3g}")
    save_baird(runs, output)
    typer.echo(f"Written: {output}")


# typer raises click's errors, and newer versions of typer vendor click: this is the class in both.
_UsageError: Any = typer.BadParameter.__mro__[1]


class OneLineErrors(TyperGroup):
    """Commands that report invalid input (exit code 2) and interrupts (exit code 130) in one line on stderr."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command and exit."""
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except _UsageError as error:
            _complain(f"{error.format_message().rstrip('.')}. See --help.")
            code = 2
        sys.exit(code)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; exit with code 2 after invalid input, with code 130 after an interrupt."""
        try:
            return super().invoke(ctx)
        except ArgumentError as error:
            _complain(str(error))
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            _complain("interrupted")
            raise typer.Exit(130) from None


def _complain(message: str) -> None:
    typer.echo(f"persample: {' '.join(message.split())}", err=True)


app = typer.Typer(
    cls=OneLineErrors,
    help="Per-sample gradients of PyTorch losses.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"persample {version('persample')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Compute per-sample gradients of PyTorch losses."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command()(train_command.train)
app.command()(baird)
app.command()(stats_command.stats)


@app.command()
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

    The averaged updates of TD(0) and of REINFORCE, with time, memory, and the largest difference.
    """
    settings = Settings(env, episodes, hidden, cast("Engine", engine), seed, rounds)
    directory = None if output is None else writable(output, "report.json", "compare.png")
    comparisons = _compared(settings)
    # Wide enough for the table where there is no terminal to ask.
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table(comparisons))
    for note in notes(comparisons):
        console.print(note, soft_wrap=True)
    if directory is not None:
        save_report(settings, comparisons, directory / "report.json")
        title = f"Averaged update on {env}, hidden width {hidden}, {engine} engine"
        save_comparison(comparisons, title, directory / "compare.png")
        console.print(f"Written: {directory / 'report.json'}, {directory / 'compare.png'}", soft_wrap=True)
    if not all(row.agrees for comparison in comparisons for row in comparison.rows):
        raise typer.Exit(1)


def _compared(settings: Settings) -> list[Comparison]:
    envs = make_envs(settings)
    try:
        with _progress() as progress:
            tasks = {
                "transitions": progress.add_task("transitions for TD(0)", total=settings.transitions),
                "episodes": progress.add_task("episodes for REINFORCE", total=settings.episodes),
            }
            rollout = roll_out(settings, envs, lambda kind, new: progress.advance(tasks[kind], new))
    finally:
        envs.close()
    cases = (td_case(rollout), reinforce_case(rollout))
    # A bar that refreshes itself has a thread, which would slow down the timed calls.
    with _progress(auto_refresh=False) as progress:
        task = progress.add_task("updates               ", total=len(cases) * calls(settings.rounds))

        def advance(new: int) -> None:
            progress.update(task, advance=new, refresh=True)

        return [run_comparison(case, settings.engine, settings.rounds, advance) for case in cases]


def _progress(*, auto_refresh: bool = True) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), auto_refresh=auto_refresh)
