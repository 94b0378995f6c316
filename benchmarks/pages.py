"""Writes the tables and figures of README and of the documentation from the committed results: ``make bench-report``.

There is one results file per machine. README has three numbers of ``results/cpu.json`` and ``results/large``;
docs/benchmarks.md and docs/benchmark-tables.md have a part for each file. Those in ``results/sweep`` are runs of the
sweep, which have a part of their own on both pages. Those in ``results/gpu`` replace the figures of docs/gpu.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.notes import NOTES
from benchmarks.report.cards import card_table
from benchmarks.report.figures import draw, shown_by
from benchmarks.report.files import read
from benchmarks.report.front import first_calls, headlines, processors, verdicts
from benchmarks.report.memory import Peaks, peaks
from benchmarks.report.page import machine, numbers, overview
from benchmarks.report.plots import Curves, Dots, fingerprint, plots
from benchmarks.report.records import UNIT, Results
from benchmarks.report.sweep import distribution, every_workload, goals
from benchmarks.report.tables import short_table
from benchmarks.report.text import words
from benchmarks.sweep.draws import DRAWS
from persample.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- benchmarks: begin (made by `make bench-report`; edits are lost) -->"
END = "<!-- benchmarks: end -->"
README, DOCS, TABLES = Path("README.md"), Path("docs/benchmarks.md"), Path("docs/benchmark-tables.md")
GPU = Path("docs/gpu.md")
PICTURES = Path("docs/benchmarks")
# The run, quantity, workloads and methods of the summary's table.
MAIN, QUANTITY = "cpu", "clipped_mean"
WORKLOADS = (
    "TD(0) MLP 64, B=256",
    "TD(0) MLP 256, B=256",
    "TD(0) MLP 256, B=1024",
    "REINFORCE MLP 64, 32x200",
    "DQN Nature CNN, B=32",
    "GRU policy, 32x50",
    "transformer tied, B=16",
)
OURS = "persample eager", "persample traced", "persample compiled"
METHODS = (*OURS, "torch.func", "Opacus ghost clipping", "JAX jit(vmap(grad))")
# README's picture: of which curves, and what it calls them.
CURVES, PICTURE = f"scaling-{QUANTITY}-batch", "memory"
NAMES = {"torch.func": "torch.func: vmap(grad)", "persample eager": "persample", UNIT: "ordinary backward pass"}
_SWEEP = f"""Time of a clipped mean over that of one {UNIT}, on workloads whose kinds and sizes a seed draws.
Ahead of the best peer means by over 5 %. A peer that cannot compute a workload is not compared with. Every
workload is in the [tables](benchmark-tables.md)."""
_NOTHING = "No results are committed yet: `make bench-peers` measures, and `make bench-report` writes them down here.\n"


def runs(root: Path, folder: str = "") -> dict[str, Results]:
    """Read the committed results by file name, README's first."""
    paths = (root / "benchmarks" / "results" / folder).glob("*.json")
    files = sorted(paths, key=lambda path: (path.stem != MAIN, path.stem))
    return {path.stem: read(path) for path in files}


def pages(root: Path, found: dict[str, Results]) -> dict[Path, str]:
    """Return the up-to-date text of the pages."""
    swept = runs(root, "sweep")
    inside = {
        README: readme_part(found, runs(root, "large")),
        DOCS: docs_part(found) + _swept(swept, sweep_part),
        TABLES: tables_part(found) + _swept(swept, lambda run: every_workload(run).markdown()),
    }
    if cards := runs(root, "gpu"):
        inside[GPU] = "\n".join(card_table(run) for run in cards.values())
    return {root / page: between(root / page, part) for page, part in inside.items()}


def readme_part(found: dict[str, Results], large: dict[str, Results]) -> str:
    """Return README's three numbers."""
    run = found.get(MAIN)
    if run is None:
        return _NOTHING
    machines = "; GPT-2: ".join(dict.fromkeys(machine(x.environment) for x in (run, *large.values())))
    lines = headlines(run, large.values(), QUANTITY, (OURS[0], OURS[-1]), "torch.func")
    first = f"A {words(QUANTITY)}, beside the forward and backward pass of the batch:"
    return f"{first}\n\n{lines}\n*Measured on {machines}.*\n"


def summary(found: dict[str, Results]) -> str:
    """Return the main table, what it leaves out, and one row per machine."""
    run = found.get(MAIN)
    if run is None:
        return _NOTHING
    return "\n\n".join(
        [
            f"Time of a {words(QUANTITY)} over that of one {UNIT} (forward and backward pass, not compiled),\n"
            f"on {machine(run.environment)}:",
            short_table(run, QUANTITY, WORKLOADS, METHODS).rstrip(),
            f"{first_calls(run, OURS)}\n{verdicts(run, OURS[0])}",
            processors(found, QUANTITY, OURS).markdown(),
        ]
    )


def docs_part(found: dict[str, Results]) -> str:
    """Return the summary, and of each machine's report what is read; the notes apply to README's run."""
    parts = _parts(found, lambda name, run, at: overview(run, at, NOTES if name == MAIN else None, level=3))
    return f"## In short\n\n{summary(found)}\n{parts}"


def tables_part(found: dict[str, Results]) -> str:
    """Return the part of each machine's report that is looked up."""
    return _parts(found, lambda _, run, at: numbers(run, at, level=3))


def sweep_part(run: Results) -> str:
    """Return the distribution of a sweep's ratios, and its goals."""
    measured = len({record.workload for record in run.records})
    some = f"Measured so far: {measured} of {len(DRAWS)} workloads.\n" if measured < len(DRAWS) else ""
    return f"{some}{_SWEEP}\n\n{distribution(run).markdown()}\n{goals(run).markdown()}"


def _swept(swept: dict[str, Results], text: Callable[[Results], str]) -> str:
    return "".join(f"\n## The sweep on {machine(run.environment)}\n\n{text(run)}" for run in swept.values())


def _parts(found: dict[str, Results], text: Callable[[str, Results, str], str]) -> str:
    parts = [
        f"## {machine(run.environment)}\n\n{text(name, run, f'{PICTURES.name}/{name}/')}" for name, run in found.items()
    ]
    return "\n".join(parts) or _NOTHING


def between(page: Path, part: str) -> str:
    """Return the text of a page with ``part`` between its markers."""
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        received, fix = f"{text.count(BEGIN)} and {text.count(END)} of them", f"Write {BEGIN} and {END}."
        raise ArgumentError.about(page.name, expected="one pair of markers", received=received, fix=fix)
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n\n{part}\n{END}{after}"


def pictures(root: Path, found: dict[str, Results]) -> dict[Path, Dots | Curves | Peaks]:
    """Return the up-to-date data of every picture."""
    drawn: dict[Path, Dots | Curves | Peaks] = {}
    for run, results in found.items():
        drawn |= {root / PICTURES / run / f"{name}.png": plot for name, plot in plots(results).items()}
        curves = plots(results).get(CURVES)
        if run == MAIN and isinstance(curves, Curves):
            drawn[root / PICTURES / run / f"{PICTURE}.png"] = peaks(
                curves, NAMES, f"Clipping every sample's gradient: memory of one call\n({curves.title})"
            )
    return drawn


def stale(root: Path = ROOT) -> list[Path]:
    """List the pages and pictures that do not match the committed results."""
    found = runs(root)
    drawn = pictures(root, found)
    return [
        *(page for page, text in pages(root, found).items() if page.read_text(encoding="utf-8") != text),
        *(picture for picture, plot in drawn.items() if shown_by(picture) != fingerprint(plot)),
        *(picture for picture in (root / PICTURES).glob("*/*.png") if picture not in drawn),
    ]


def write(root: Path = ROOT) -> list[Path]:
    """Write all pages and pictures, and return those that were stale."""
    found, before = runs(root), stale(root)
    for page, text in pages(root, found).items():
        page.write_text(text, encoding="utf-8")
    drawn = pictures(root, found)
    for picture in set((root / PICTURES).glob("*/*.png")) - drawn.keys():
        picture.unlink()
    for picture, plot in drawn.items():
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw(plot, picture)
    return before


def main(root: Path = ROOT) -> None:
    """Write all pages and pictures, and print those that changed; exit with an error if a note is missing."""
    try:
        changed = write(root)
    except ArgumentError as error:
        sys.exit(str(error))
    sys.stdout.write("".join(f"written: {path.relative_to(root)}\n" for path in changed) or "nothing has changed\n")


if __name__ == "__main__":
    main()
