"""The commands, and how they report errors."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from persample.cli.compare_command import compare
from persample.cli.output import spelled
from persample.cli.stats_command import stats
from persample.cli.train_command import train
from persample.errors import ArgumentError
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
