"""``persample bench report``: tables and figures of a run of the benchmark suite."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from persample.bench.files import read
from persample.bench.records import Results
from persample.bench.report import machine, save_report
from persample.bench.summaries import losses_grid, standings_grid, targets_grid
from persample.bench.text import Grid
from persample.cli.report import writable

bench = typer.Typer(help="Results of the benchmark suite.", no_args_is_help=True, rich_markup_mode=None)

_HELP = (
    "Turn the results of a run into a page of tables with figures beside it, and print where we are ahead, where "
    "behind, and what was demanded."
)


@bench.callback()
def root() -> None:
    """Hold the commands together."""


@bench.command(help=_HELP)
def report(
    results: Annotated[Path, typer.Argument(help="The JSON file that the run has written.")],
    output: Annotated[Path, typer.Option(help="Directory for report.md and the figures.")] = Path("bench-report"),
) -> None:
    """Report on a run.

    Args:
        results: the JSON file of the run.
        output: where to write.
    """
    run = read(results)
    directory = writable(output, "report.md")
    # Wide enough for the tables where there is no terminal to ask.
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(escape(f"{_counts(run)} on {machine(run.environment)}"), soft_wrap=True)
    for title, grid in _summary(run).items():
        console.print(_table(title, grid))
    written = save_report(run, directory)
    console.print(escape(f"Written: {written[0]} and {len(written) - 1} figures beside it"), soft_wrap=True)


def _counts(run: Results) -> str:
    done = sum(record.status == "ok" for record in run.records)
    return f"{done} of {len(run.records)} measurements, {len(run.scaling)} points of scaling curves,"


def _summary(run: Results) -> dict[str, Grid]:
    grids = {
        "Where we stand": standings_grid(run),
        "Where we lose": losses_grid(run),
        "Demanded and measured": targets_grid(run),
    }
    return {title: grid for title, grid in grids.items() if grid.rows}


def _table(title: str, grid: Grid) -> Table:
    result = Table(title=title, title_justify="left")
    for column, heading in enumerate(grid.headings):
        result.add_column(heading, justify="right" if column in grid.numbers else "left")
    for row in grid.rows:
        result.add_row(*map(escape, row))
    return result
