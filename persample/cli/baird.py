"""``persample baird``: the figure of Baird's counterexample."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from persample.cli.figures import BAIRD, save_baird
from persample.cli.report import writable
from persample.errors import ArgumentError
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
