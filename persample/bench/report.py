"""The report of a run: Markdown with its figures beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from persample.bench.figures import draw
from persample.bench.plots import Curves, Dots, plots
from persample.bench.records import Results
from persample.bench.standings import Notes, check_notes, losses
from persample.bench.summaries import losses_grid, standings_grid, targets_grid
from persample.bench.tables import environment_grid, full_table, unit_line
from persample.bench.text import escaped, words

_STANDINGS = """Pairs of a workload and a quantity, by how each method stands against the best of all others."""
_LOSSES = """Where another method needs less than all of ours, by more than 5 % (of memory: also by more than 1 MiB)."""
_TARGETS = """What the issues of the project demand of the time relative to one batch gradient, or of what is named."""
_TIMES = """A dot per method. What has no dot cannot do it, is wrong, or was given up: the tables say which, and why."""
_CURVES = """Physical limits are dashed. Curves end where a method fails; the reasons stand below the figure."""
_NUMBERS = """Ratios are medians over rounds of the time relative to the batch gradient's in the same round, ± half
their interquartile range; the best is bold. Memory is what one call adds to the peak of a fresh process. The first
call includes compiling. Errors are relative to the largest entry, against the plain loop in float64."""


def report(results: Results, pictures: str, notes: Notes | None = None, level: int = 2) -> str:
    """Write the report of a run.

    Args:
        results: of the run.
        pictures: where its figures are, as seen from the page, ending in a slash (or empty).
        notes: why we lose where we lose, by (workload, quantity, measure); without them that column is left out.
        level: of the headings.

    Returns:
        The Markdown.

    Raises:
        ArgumentError: if a row that is lost has no note, or a note no such row.
    """
    lost = losses(results)
    if notes is not None:
        check_notes(lost, notes)
    figures = plots(results)
    dots = "\n".join(_picture(name, plot, pictures) for name, plot in figures.items() if isinstance(plot, Dots))
    curves = "\n".join(_picture(name, plot, pictures) for name, plot in figures.items() if isinstance(plot, Curves))
    parts = {
        "Where we stand": f"{_STANDINGS}\n\n{standings_grid(results).markdown()}",
        "Where we lose": f"{_LOSSES}\n\n{losses_grid(results, notes).markdown() if lost else 'Nowhere in this run.'}",
        "Demanded and measured": f"{_TARGETS}\n\n{targets_grid(results).markdown()}" if results.targets else "",
        "Figures": f"{_TIMES}\n\n{dots}" if dots else "",
        "Scaling": f"{_CURVES}\n\n{curves}" if curves else "",
        "All numbers": f"{_NUMBERS}\n\n{_numbers(results, level + 1)}",
        "What it ran on": environment_grid(results.environment).markdown(),
    }
    return "\n".join(f"{'#' * level} {title}\n\n{text.rstrip()}\n" for title, text in parts.items() if text)


def _picture(name: str, plot: Dots | Curves, pictures: str) -> str:
    described = f"{plot.title}: {' '.join(plot.label.split())}"
    ends = {method: line.end for method, line in plot.lines.items()} if isinstance(plot, Curves) else {}
    lines = "".join(f"- {method}: {escaped(end)}\n" for method, end in ends.items() if end)
    return f"![{described}]({pictures}{name}.png)\n" + (f"\n{lines}" if lines else "")


def _numbers(results: Results, level: int) -> str:
    workloads: dict[str, dict[str, None]] = {}
    for record in results.records:
        workloads.setdefault(record.workload, {})[record.quantity] = None
    return "\n".join(
        f"{'#' * level} {workload}\n\n{unit_line(results, workload)}\n\n"
        + "\n".join(f"{words(quantity)}:\n\n{full_table(results, workload, quantity)}" for quantity in quantities)
        for workload, quantities in workloads.items()
    )


def machine(environment: dict[str, Any]) -> str:
    """Say in a few words what a run was made on.

    Args:
        environment: of the run.

    Returns:
        The processor or accelerator, threads, torch and the date, as far as they are known.

    Examples:
        >>> machine({"cpu": "a CPU", "gpu": None, "torch_threads": 2, "torch": "2.13.0"})
        'a CPU, threads: 2, torch 2.13.0'
    """
    device = environment.get("gpu") or environment.get("cpu") or "an unknown machine"
    forms = {"torch_threads": "threads: {}", "torch": "torch {}", "date": "{}"}
    known = [form.format(environment[name]) for name, form in forms.items() if environment.get(name)]
    return ", ".join([str(device), *known])


def save_report(results: Results, directory: Path) -> list[Path]:
    """Write the report and its figures.

    Args:
        results: of a run.
        directory: where they go; it exists.

    Returns:
        The files.
    """
    page = directory / "report.md"
    text = f"# Benchmarks on {machine(results.environment)}\n\n{report(results, '')}"
    page.write_text(text, encoding="utf-8")
    return [page, *save_pictures(results, directory)]


def save_pictures(results: Results, directory: Path) -> list[Path]:
    """Draw all figures of a run.

    Args:
        results: of the run.
        directory: where they go; it exists.

    Returns:
        The files.
    """
    paths = {directory / f"{name}.png": plot for name, plot in plots(results).items()}
    for path, plot in paths.items():
        draw(plot, path)
    return list(paths)
