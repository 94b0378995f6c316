"""Summarizes one run on the terminal and writes its page: ``make bench-summary``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.report.files import read
from benchmarks.report.page import machine, save_report
from benchmarks.report.records import Results
from benchmarks.report.summaries import goals_grid, losses_grid, standings_grid
from benchmarks.report.text import Grid
from persample.cli.output import writable
from persample.errors import ArgumentError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help="Summarize a run, and write a page of tables with figures beside it.")
def summarize(
    results: Annotated[Path, typer.Argument(help="The JSON file that the run has written.")],
    output: Annotated[Path, typer.Option(help="Directory for report.md and the figures.")] = Path("bench-report"),
) -> None:
    """Print the summary of a run and write its page.

    Args:
        results: the JSON file of the run.
        output: the directory of the page and its figures.

    Raises:
        Exit: with code 2 if ``results`` cannot be read or ``output`` cannot be written.
    """
    try:
        run, directory = read(results), writable(output, "report.md")
    except ArgumentError as error:
        typer.echo(" ".join(str(error).split()), err=True)
        raise typer.Exit(2) from None
    # Wide enough for the tables where there is no terminal to ask.
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(escape(f"{_counts(run)} on {machine(run.environment)}"), soft_wrap=True)
    for title, grid in _summary(run).items():
        console.print(_table(title, grid))
    page, *figures = save_report(run, directory)
    console.print(escape(f"Written: {page} and {len(figures)} figures beside it"), soft_wrap=True)


def _counts(run: Results) -> str:
    done = sum(record.status == "ok" for record in run.records)
    return f"{done} of {len(run.records)} measurements, {len(run.scaling)} points of scaling curves,"


def _summary(run: Results) -> dict[str, Grid]:
    grids = {"Where we stand": standings_grid(run), "Where we lose": losses_grid(run), "Goals": goals_grid(run)}
    return {title: grid for title, grid in grids.items() if grid.rows}


def _table(title: str, grid: Grid) -> Table:
    result = Table(title=title, title_justify="left")
    for column, heading in enumerate(grid.headings):
        result.add_column(heading, justify="right" if column in grid.numbers else "left")
    for row in grid.rows:
        result.add_row(*map(escape, row))
    return result


if __name__ == "__main__":
    app()
