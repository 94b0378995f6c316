"""``persample baird``: the figure of Baird's counterexample."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from persample.cli.report import writable
from persample.errors import ArgumentError
from persample.rl.baird import STEP_SIZES, BairdRun, baird_run

HELP = "Draw Baird's counterexample: semi-gradient TD(0) diverges, GTD2 and TDC do not."

# Okabe, Ito, "Color Universal Design" (2008).
_STYLES = {"td0": ("semi-gradient TD(0)", "#e69f00"), "gtd2": ("GTD2", "#56b4e9"), "tdc": ("TDC", "#0072b2")}


def baird(
    updates: Annotated[int, typer.Option(help="Updates of 32 transitions each.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the transitions.")] = 0,
    output: Annotated[Path, typer.Option(help="The PNG file.")] = Path("baird.png"),
) -> None:
    """Run the three methods and draw their errors.

    Args:
        updates: the number of updates.
        seed: the seed of the transitions.
        output: the PNG file.

    Raises:
        ArgumentError: if ``updates`` is less than 1, or the file is no PNG file or cannot be written.
    """
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
        typer.echo(f"{_STYLES[method][0]}: value error {values:.3g}, Bellman error {bellman:.3g}")
    _save(runs, output)
    typer.echo(f"Written: {output}")


def _save(runs: dict[str, BairdRun], path: Path) -> None:
    figure = Figure(figsize=(5.5, 6.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("Baird's counterexample, batches of 32 off-policy transitions")
    panels = figure.subplots(2, 1)
    for axes, field, label in zip(panels, BairdRun._fields, ("values", "Bellman errors"), strict=True):
        for method, run in runs.items():
            name, color = _STYLES[method]
            axes.plot(getattr(run, field), color=color, label=name)
        axes.set(xlabel="updates", ylabel=f"RMS of the {label}, log scale", yscale="log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
