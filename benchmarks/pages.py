"""Writes the tables and figures of README and docs/benchmarks.md from the committed results: ``make bench-report``.

There is one results file per machine. README shows ``results/cpu.json``; docs/benchmarks.md has a part for each file.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from benchmarks.notes import NOTES
from benchmarks.report.figures import draw, shown_by
from benchmarks.report.files import read
from benchmarks.report.page import machine, report
from benchmarks.report.plots import Curves, Dots, fingerprint, plots
from benchmarks.report.records import Results
from benchmarks.report.standings import standings
from benchmarks.report.tables import short_table
from benchmarks.report.text import words
from persample.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- benchmarks: begin (made by `make bench-report`; edits are lost) -->"
END = "<!-- benchmarks: end -->"
README, DOCS, PICTURES = Path("README.md"), Path("docs/benchmarks.md"), Path("docs/benchmarks")
# The run, quantity and workloads of README's table and figure.
MAIN, QUANTITY = "cpu", "clipped_mean"
COLUMNS = (
    "TD(0) MLP 256, B=256",
    "TD(0) MLP 256, B=1024",
    "REINFORCE MLP 64, 32x200",
    "DQN Nature CNN, B=32",
    "GRU policy, 32x50",
    "transformer tied, B=16",
)
_NOTHING = "No results are committed yet: `make bench-peers` measures, and `make bench-report` writes them down here.\n"


def runs(root: Path) -> dict[str, Results]:
    """Read the committed results by file name, README's first."""
    files = sorted((root / "benchmarks" / "results").glob("*.json"), key=lambda path: (path.stem != MAIN, path.stem))
    return {path.stem: read(path) for path in files}


def pages(root: Path, found: dict[str, Results]) -> dict[Path, str]:
    """Return the up-to-date text of the two pages."""
    inside = {README: readme_part(found.get(MAIN)), DOCS: docs_part(found)}
    return {root / page: between(root / page, part) for page, part in inside.items()}


def readme_part(run: Results | None) -> str:
    """Return README's table and figure."""
    if run is None:
        return _NOTHING
    counts = Counter(standing.verdict for standing in standings(run, "time"))
    total = sum(counts.values())
    summary = (
        f"Medians on {machine(run.environment)}. Of {total} pairs of a workload and a quantity, our fastest method is\n"
        f"ahead of all others in {counts['ahead'] + counts['alone']}, within 5 % of the best in {counts['even']}, and "
        f"[behind in {counts['behind']}]({DOCS}#where-we-lose)."
    )
    picture = f"![time of every method on every workload]({PICTURES}/{MAIN}/time-{QUANTITY}.png)"
    title = f"Time of a {words(QUANTITY)} relative to one batch gradient:"
    return f"{title}\n\n{short_table(run, QUANTITY, COLUMNS)}\n{summary}\n\n{picture}\n"


def docs_part(found: dict[str, Results]) -> str:
    """Return one report per machine; the notes apply to README's run."""
    parts = [
        f"## {machine(run.environment)}\n\n"
        + report(run, f"{PICTURES.name}/{name}/", NOTES if name == MAIN else None, level=3)
        for name, run in found.items()
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


def pictures(root: Path, found: dict[str, Results]) -> dict[Path, Dots | Curves]:
    """Return the up-to-date data of every picture."""
    return {
        root / PICTURES / run / f"{name}.png": plot
        for run, results in found.items()
        for name, plot in plots(results).items()
    }


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
