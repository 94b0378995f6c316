"""Measure all methods on all workloads, and store the results as JSON: ``python -m benchmarks.run --help``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import measure, scaling
from benchmarks.cells import cells, swept
from benchmarks.cells import large as of_large
from benchmarks.process import ROOT, FailedError
from benchmarks.report.records import Record
from benchmarks.session import Session
from benchmarks.targets import TARGETS
from benchmarks.workers import Workers
from persample.errors import ArgumentError

RESULTS = ROOT / "benchmarks/results"
console = Console()
app = typer.Typer(add_completion=False)


@app.command()
def run(
    *,
    results: Annotated[Path | None, typer.Option(help="JSON file; what is in it is not measured again.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Text in the label of what is measured; all must be.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A smoke run of under 2 minutes; its times mean little.")
    ] = False,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="The sweep: clipped means of workloads whose sizes are drawn.")
    ] = False,
    large: Annotated[bool, typer.Option("--large", help="GPT-2 with 124 million parameters, by our methods.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Start the file anew.")] = False,
    cuda: Annotated[bool, typer.Option("--cuda", help="On the GPU, with its own clock and allocator.")] = False,
) -> None:
    """Measure every method against the batch gradient, in alternating rounds, after checking its result.

    Labels are "WORKLOAD, QUANTITY, METHOD" and "scaling, WORKLOAD, QUANTITY, METHOD". Ctrl-C stops at any time; the
    same command measures the missing rows.
    """
    if cuda and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no GPU here; leave it out to measure on the CPU", param_hint="--cuda")
    folder = Path(tempfile.mkdtemp()) if quick else RESULTS / ("sweep" if sweep else "large" if large else "")
    path = results or folder / ("cuda.json" if cuda else "cpu.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    if again:
        path.unlink(missing_ok=True)
    try:
        _run(path, only or [], quick=quick, sweep=sweep, large=large, cuda=cuda)
    except KeyboardInterrupt:
        console.print(f"Stopped. What was measured is in {path}; the same command (without --again) goes on.")
        raise typer.Exit(130) from None
    except (ArgumentError, FailedError) as error:
        console.print(f"Error: {error}", markup=False)
        raise typer.Exit(1) from error


def _run(path: Path, only: list[str], *, quick: bool, sweep: bool, large: bool, cuda: bool) -> None:
    pace = measure.QUICK if quick else measure.SWEEP if sweep else measure.LARGE if large else measure.Pace()
    with Workers(cuda=cuda, cold=not quick, shared=sweep) as workers, _progress() as progress:
        for name in workers.missing:
            progress.console.print(f"[yellow]Without the environment {name}[/]: `make bench-peers` creates it.")
        task = progress.add_task("")
        whole = not (sweep or large)
        session = Session(workers, path, pace, _report(progress, task), TARGETS if whole else ())
        listed, options = workers.methods, {"quick": quick, "only": only}
        todo = session.missing((swept if sweep else of_large if large else cells)(listed, **options))
        points = [] if not whole else session.missing(scaling.points(listed, **options))
        progress.update(task, total=len(todo) + len(points))
        session.measure_cells(todo)
        session.measure_points(points)
    console.print(f"Results: {path}")


def _progress() -> Progress:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    return Progress(*columns, console=console)


def _report(progress: Progress, task) -> Callable[[str, Record], None]:
    def report(label: str, record: Record) -> None:
        progress.console.print(f"{escape(label)}: {escape(record.words)}", highlight=False)
        progress.advance(task)

    return report


if __name__ == "__main__":
    app()
