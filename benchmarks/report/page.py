"""The report of one run: a Markdown page with its figures beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report.figures import draw
from benchmarks.report.plots import Curves, Dots, plots
from benchmarks.report.records import Results
from benchmarks.report.standings import Notes, check_notes, losses
from benchmarks.report.summaries import goals_grid, losses_list, standings_grid
from benchmarks.report.tables import environment_grid, full_table, unit_line
from benchmarks.report.text import escaped, shortened, words

# The figures of this quantity are on the page that is read.
_READ = "clipped_mean"
_STANDINGS = "Pairs of a workload and a quantity, by how each of our methods compares with the best of all others."
_LOSSES = """Here the best other method beats our best by over 5 % (for memory, also by over 1 MiB).
Times are in batch gradients."""
_GOALS = "Limits are relative to one batch gradient, unless a cell names another method or a unit."
_TIMES = "One dot per method. Methods without a dot refused, were wrong, or were stopped; the tables give the reasons."
_CURVES = "Dashed curves are physical limits. A curve ends where its method fails; the reasons are below the figure."
_NUMBERS = """A ratio is the time divided by the batch gradient's time of the same round: the median over all rounds,
± half the interquartile range. The best ratio is bold. Memory is what one call adds to the peak of a fresh process. The
first call includes compilation. Errors are relative to the largest entry of the plain loop's result in float64."""


def report(results: Results, pictures: str, notes: Notes | None = None, level: int = 2) -> str:
    """Write the whole report of a run: what `overview` and `numbers` say.

    Args:
        results: of the run.
        pictures: as in `overview`.
        notes: as in `overview`.
        level: as in `overview`.

    Returns:
        The Markdown.
    """
    return "\n".join([overview(results, pictures, notes, level), numbers(results, pictures, level)])


def overview(results: Results, pictures: str, notes: Notes | None = None, level: int = 2) -> str:
    """Write the part of a report that is read: standings, losses, and the figures of clipped means.

    Args:
        results: of the run.
        pictures: the path from the page to its figures, empty or ending in a slash.
        notes: the reason of every loss, by (workload, quantity, measure); None omits the reasons.
        level: the level of the top headings.

    Returns:
        The Markdown.

    Raises:
        ArgumentError: if a loss has no note, or a note has no loss.
    """
    lost = losses(results)
    if notes is not None:
        check_notes(lost, notes)
    dots, curves = _figures({name: plot for name, plot in plots(results).items() if _READ in name}, pictures)
    parts = {
        "Where we stand": f"{_STANDINGS}\n\n{standings_grid(results).markdown()}",
        "Where we lose": f"{_LOSSES}\n\n{losses_list(results, notes) if lost else 'Nowhere in this run.'}",
        "Figures": dots,
        "Scaling": curves,
    }
    return _joined(parts, level)


def numbers(results: Results, pictures: str, level: int = 2) -> str:
    """Write the part of a report that is looked up: goals, all numbers, the other figures, and the environment.

    Args:
        results: of the run.
        pictures: the path from the page to its figures, empty or ending in a slash.
        level: the level of the top headings.

    Returns:
        The Markdown.
    """
    dots, curves = _figures({name: plot for name, plot in plots(results).items() if _READ not in name}, pictures)
    parts = {
        "Goals": f"{_GOALS}\n\n{goals_grid(results).markdown()}" if results.targets else "",
        "All numbers": f"{_NUMBERS}\n\n{_numbers(results, level + 1)}",
        "More figures": dots,
        "More scaling": curves,
        "What it ran on": environment_grid(results.environment).markdown(),
    }
    return _joined(parts, level)


def _figures(figures: dict[str, Dots | Curves], pictures: str) -> tuple[str, str]:
    dots = "\n".join(_picture(name, plot, pictures) for name, plot in figures.items() if isinstance(plot, Dots))
    curves = "\n".join(_picture(name, plot, pictures) for name, plot in figures.items() if isinstance(plot, Curves))
    return f"{_TIMES}\n\n{dots}" if dots else "", f"{_CURVES}\n\n{curves}" if curves else ""


def _joined(parts: dict[str, str], level: int) -> str:
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
    """Describe the machine of a run in a few words.

    Args:
        environment: the environment of the run.

    Returns:
        The known ones of: processor or accelerator, threads, version of torch, date.

    Examples:
        >>> machine({"cpu": "a CPU", "gpu": None, "torch_threads": 2, "torch": "2.13.0"})
        'a CPU, threads: 2, torch 2.13.0'
    """
    device = environment.get("gpu") or environment.get("cpu") or "an unknown machine"
    forms = {"torch_threads": "threads: {}", "torch": "torch {}", "date": "{}"}
    known = [form.format(environment[name]) for name, form in forms.items() if environment.get(name)]
    return escaped(shortened(", ".join([str(device), *known])))


def save_report(results: Results, directory: Path) -> list[Path]:
    """Write the report and its figures.

    Args:
        results: of a run.
        directory: an existing directory for the files.

    Returns:
        The paths of the page and of the figures.
    """
    page = directory / "report.md"
    text = f"# Benchmarks on {machine(results.environment)}\n\n{report(results, '')}"
    page.write_text(text, encoding="utf-8")
    figures = {directory / f"{name}.png": plot for name, plot in plots(results).items()}
    for path, plot in figures.items():
        draw(plot, path)
    return [page, *figures]
