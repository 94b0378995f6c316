"""The commands, and how they report errors; ``baird``, the figure of Baird's counterexample."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from persample.cli.compare_command import compare
from persample.cli.figures import BAIRD, save_baird
from persample.cli.output import check_counts, spelled, writable
from persample.cli.stats_command import stats
from persample.cli.train_command import train
from persample.errors import ArgumentError
from persample.rl.baird import STEP_SIZES, baird_run
from persample.utils.trees import Tree

# typer raises click's errors, and newer versions of typer vendor click: this is the class in both.
_UsageError: Any = typer.BadParameter.__mro__[1]


class OneLineErrors(TyperGroup):
    """Commands that report invalid input (exit code 2) and interrupts (exit code 130) in one line on stderr."""

    def main(self, *args: Any, **kwargs: Any) -> Tree:
        """Run a command and exit."""
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except _UsageError as error:
            _complain(f"{error.format_message().rstrip('.')}. See --help.")
            code = 2
        sys.exit(code)

    def invoke(self, ctx: Tree) -> Tree:
        """Run a command; exit with code 2 after invalid input, with code 130 after an interrupt."""
        try:
            return super().invoke(ctx)
        except (ArgumentError, NotImplementedError) as error:
            argument, colon, rest = str(error).partition(": ")
            is_option = argument.islower() and argument.isidentifier()
            _complain(f"{spelled(argument) if is_option else argument}{colon}{rest}")
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
app.command()(compare)
app.command()(stats)
app.add_typer(train, name="train")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False
) -> None:
    """Compute per-sample gradients of PyTorch losses."""
    if version:
        typer.echo(f"persample {importlib.metadata.version('persample')}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def baird(
    updates: Annotated[int, typer.Option(help="Updates of 32 transitions each.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the transitions.")] = 0,
    output: Annotated[Path, typer.Option(help="The PNG file.")] = Path("baird.png"),
) -> None:
    """Draw Baird's counterexample: semi-gradient TD(0) diverges, GTD2 and TDC do not."""
    check_counts(1, updates=updates)
    if output.suffix.lower() != ".png":
        fix = "Name it like errors.png."
        raise ArgumentError.about("output", expected="a .png file", received=str(output), fix=fix)
    writable(output.parent, output.name)
    runs = {method: baird_run(method, updates, seed=seed) for method in STEP_SIZES}
    for method, run in runs.items():
        values, bellman = run.value_error[-1], run.bellman_error[-1]
        typer.echo(f"{BAIRD[method][0]}: value error {values:.3g}, Bellman error {bellman:.3g}")
    save_baird(runs, output)
    typer.echo(f"Written: {output}")
