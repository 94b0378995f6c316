"""The report of a benchmark run, and the pages that are made of the committed results."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import bench_run
import pytest
from bench_run import RUN, TD, record
from typer.testing import CliRunner

from benchmarks import pages
from benchmarks.report.__main__ import app
from benchmarks.report.figures import draw, shown_by
from benchmarks.report.files import read, write
from benchmarks.report.front import WIDE, first_calls, processors, verdicts
from benchmarks.report.memory import peaks
from benchmarks.report.page import report
from benchmarks.report.plots import Curves, Dots, fingerprint, plots
from benchmarks.report.records import FILL, GEMMS, UNIT, Record, Results
from benchmarks.report.styles import styles
from benchmarks.report.tables import full_table, short_table
from persample.errors import ArgumentError


def cells(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


class TestTables:
    def test_all_that_was_measured_is_there(self):
        page = report(RUN, "")
        rows = [cells(line) for line in page.partition("All numbers")[2].splitlines() if line.startswith("| ")]
        rows = [row for row in rows if len(row) == 6 and row[0] not in {"method", "---"}]
        assert len(rows) == len(RUN.records)
        assert all(row[1] for row in rows)

    def test_a_row_says_everything(self):
        exact = record("persample", 0.841, ratio_iqr=0.04, first_call_s=6.0, error=2e-7, median_s=1.7e-3)
        lines = full_table(Results(records=(exact, record("other", 2.0))), "w", "norms").splitlines()
        assert cells(lines[2]) == ["**persample**", "**0.84** ± 0.02", "1.70 ms", "16 MiB", "6.00 s", "2e-07"]
        assert cells(lines[3])[:2] == ["other", "2.00"]

    def test_who_cannot_says_why_and_breaks_no_table(self):
        reason = "no | hooks\n  for <GRU>, see [the *docs*] " + "and more " * 100
        lines = full_table(Results(records=(record("Opacus", None, reason=reason),)), "w", "norms").splitlines()
        assert len(lines) == 3
        row = cells(lines[2])
        assert row[:5] == ["Opacus", "cannot", "", "", ""]
        assert row[5].startswith(r"no \| hooks for &lt;GRU&gt;, see \[the \*docs\*\] and more")
        assert row[5].endswith("…")

    def test_a_wrong_result_is_called_wrong(self):
        assert "| ExpandedWeights | wrong |  |  |  | largest relative error 0.3 |" in report(RUN, "")

    def test_the_short_table_has_a_row_per_workload_and_the_first_call_of_compiled_methods(self):
        methods = ("persample eager", "persample compiled", "Opacus hooks")
        text = short_table(RUN, "clipped_mean", (TD, "GRU policy, 32x50", "not in the run"), methods)
        lines = text.splitlines()
        assert cells(lines[0])[2:] == ["**persample eager**", "**persample compiled**",
                                       "**persample compiled**, first call", "Opacus hooks"]  # fmt: skip
        assert [cells(line)[0] for line in lines[2:]] == [TD, "GRU policy, 32x50"]
        assert cells(lines[2])[1] == "1.70 ms"
        assert cells(lines[2])[4:] == ["6.00 s", "24.6"]
        assert cells(lines[3])[5] == "cannot"

    def test_first_calls_and_both_counts_are_said(self):
        total, ahead, _, even, behind, *alone = map(int, re.findall(r"\d+", verdicts(RUN, "persample eager")))
        assert ahead + even + behind == alone[0] + alone[2] + alone[3] == total
        assert ahead > alone[0]
        assert first_calls(RUN, ("persample compiled", "not in the run")) == (
            "First calls took 6.00 s to 6.00 s (persample compiled); a compiled one includes compilation."
        )
        assert first_calls(RUN, ()) == ""

    def test_each_processor_has_a_row_with_its_range(self):
        slow = Results({"cpu": "Slow CPU"}, (record("persample", 2.0), replace(record("persample", 8.0), workload="v")))
        grid = processors({"fast": Results({"cpu": "Fast CPU"}), "slow": slow}, "norms", ["persample"])
        assert grid.rows == [["Fast CPU", "–"], ["Slow CPU", "5.00 (2.00 to 8.00)"]]

    def test_a_run_of_nothing_has_a_report(self):
        page = report(Results(), "")
        assert "Nowhere in this run." in page
        assert "## Scaling" not in page


class TestPlots:
    def test_one_figure_per_quantity_and_measure(self):
        assert set(plots(RUN)) == {
            *(f"time-{quantity}" for quantity in bench_run.QUANTITIES),
            *(f"memory-{quantity}" for quantity in ("stack", "clipped_mean")),
            *(f"scaling-{quantity}-{size}" for quantity in ("stack", "clipped_mean") for size in ("batch", "width")),
        }

    def test_dots_are_the_records(self):
        plot = plots(RUN)["time-clipped_mean"]
        assert isinstance(plot, Dots)
        assert plot.rows == tuple(bench_run.WORKLOADS)
        shown = {
            (m, row): x for m, (_, values) in plot.series.items() for row, x in zip(plot.rows, values, strict=True)
        }
        of_quantity = [r for r in RUN.records if r.quantity == "clipped_mean"]
        assert {key for key, x in shown.items() if x} == {(r.method, r.workload) for r in of_quantity if r.ratio}
        assert all(shown[r.method, r.workload] == r.ratio for r in of_quantity if r.ratio)

    def test_curves_end_where_a_method_fails(self):
        plot = plots(RUN)["scaling-clipped_mean-batch"]
        assert isinstance(plot, Curves)
        assert plot.lines["persample eager"].sizes[-1] == 16384
        assert plot.lines["persample eager"].end == ""
        assert plot.lines["torch.func"].sizes[-1] == 4096
        assert plot.lines["torch.func"].end == "out of memory at 16384: 12.9 GB"
        assert "- torch.func: out of memory at 16384: 12.9 GB\n" in report(RUN, "")

    def test_a_size_too_small_is_not_where_a_curve_ends(self):
        cannot = {"status": "cannot", "reason": "not one", "median_s": None, "peak_bytes": None}
        scaling = [replace(r, **cannot) if r.batch_size == 1 else r for r in RUN.scaling]
        line = plots(replace(RUN, scaling=tuple(scaling)))["scaling-clipped_mean-batch"].lines["torch.func"]
        assert (line.sizes[0] > 1, line.end) == (True, "out of memory at 16384: 12.9 GB")

    def test_the_picture_of_memory_has_linear_data(self, tmp_path):
        plot = peaks(plots(RUN)["scaling-clipped_mean-batch"], {"torch.func": "theirs", "persample eager": "ours"}, "t")
        assert list(plot.lines) == ["theirs", "ours"]
        _, sizes, amounts = plot.lines["theirs"]
        assert sizes == (1, 4, 16, 64, 256, 1024, 4096)
        assert amounts[-1] / amounts[0] == pytest.approx(4096, rel=1e-3)
        draw(plot, tmp_path / "plot.png")
        assert shown_by(tmp_path / "plot.png") == fingerprint(plot)

    @pytest.mark.parametrize(("quantity", "limit"), [("stack", FILL), ("clipped_mean", GEMMS)])
    def test_the_physical_limit_is_drawn(self, quantity, limit):
        for size in ("batch", "width"):
            lines = plots(RUN)[f"scaling-{quantity}-{size}"].lines
            assert set(lines) & {FILL, GEMMS} == {limit}

    def test_without_a_number_there_is_no_figure(self):
        assert plots(Results(records=(record("Opacus", None), record(UNIT, 1.0, "mean")))) == {}

    def test_methods_can_be_told_apart(self):
        looks = styles([*bench_run.METHODS, UNIT, FILL, GEMMS])
        assert len(set(looks.values())) == len(looks)

    def test_a_method_that_failed_from_the_start_has_an_empty_curve(self, tmp_path):
        point = next(p for p in RUN.scaling if p.method == "torch.func")
        run = replace(RUN, scaling=(replace(point, status="cannot", reason="no"), *RUN.scaling[:2]))
        for plot in plots(run).values():
            if isinstance(plot, Curves):
                draw(plot, tmp_path / "plot.png")
                assert shown_by(tmp_path / "plot.png") == fingerprint(plot)

    def test_a_picture_knows_its_data(self, tmp_path):
        dots = plots(RUN)["time-gram"]
        draw(dots, tmp_path / "plot.png")
        assert shown_by(tmp_path / "plot.png") == fingerprint(dots)
        changed = replace(RUN, records=tuple(replace(r, ratio=r.ratio and 1.001 * r.ratio) for r in RUN.records))
        assert fingerprint(plots(changed)["time-gram"]) != fingerprint(dots)
        assert shown_by(tmp_path / "none.png") is None
        (tmp_path / "text.png").write_text("no picture")
        assert shown_by(tmp_path / "text.png") is None


class TestCommand:
    def test_writes_a_page_whose_pictures_are_there(self, tmp_path):
        write(tmp_path / "run.json", replace(SMALL, targets=RUN.targets))
        result = CliRunner().invoke(app, [str(tmp_path / "run.json"), "--output", str(tmp_path / "r")])
        assert result.exit_code == 0, result.output
        page = (tmp_path / "r" / "report.md").read_text()
        assert set(re.findall(r"\]\((.*\.png)\)", page)) == {p.name for p in (tmp_path / "r").glob("*.png")}
        for title in ("Where we stand", "Where we lose", "Goals"):
            assert title in result.output
            assert f"## {title}\n" in page

    def test_refuses_what_is_no_results_file(self, tmp_path):
        result = CliRunner().invoke(app, [str(tmp_path / "none.json")])
        assert result.exit_code == 2
        assert "results: expected a results file" in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1

    def test_refuses_a_directory_that_cannot_be_written(self, tmp_path):
        write(tmp_path / "run.json", SMALL)
        result = CliRunner().invoke(app, [str(tmp_path / "run.json"), "--output", str(tmp_path / "run.json")])
        assert result.exit_code == 2
        assert "--output: expected a directory that can be written to" in result.stderr


LOST = ("REINFORCE MLP 64, 32x200", "clipped_mean", "time")
SMALL = Results(
    RUN.environment,
    tuple(r for r in RUN.records if r.workload in {TD, LOST[0], WIDE} and r.quantity == LOST[1]),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A repository with the three pages and a committed run, brought up to date."""
    root = tmp_path_factory.mktemp("repository")
    (root / "benchmarks" / "results").mkdir(parents=True)
    (root / "docs").mkdir()
    write(root / "benchmarks" / "results" / "cpu.json", SMALL)
    for page in (pages.README, pages.DOCS, pages.TABLES):
        (root / page).write_text(f"before\n\n{pages.BEGIN}\nedited by hand\n{pages.END}\n\nafter\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "NOTES", {LOST: "XLA fuses it"})
        pages.write(root)
    return root


@pytest.fixture
def checkout(written, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "NOTES", {LOST: "XLA fuses it"})
    return shutil.copytree(written, tmp_path / "copy")


class TestPages:
    def test_the_pages_of_this_repository_are_what_the_committed_results_make_of_them(self):
        assert pages.stale() == [], "run `make bench-report`"

    def test_what_was_written_is_not_stale(self, checkout):
        assert pages.stale(checkout) == []
        for page in (pages.README, pages.DOCS, pages.TABLES):
            text = (checkout / page).read_text()
            assert text.startswith(f"before\n\n{pages.BEGIN}\n")
            assert text.endswith(f"{pages.END}\n\nafter\n")
            assert "edited by hand" not in text
            for picture in re.findall(r"\]\((.*\.png)\)", text):
                assert (checkout / page).parent.joinpath(picture).exists()

    def test_readme_is_short(self, checkout):
        assert len((checkout / pages.README).read_text().splitlines()) < 40

    def test_edits_by_hand_are_seen(self, checkout):
        readme = checkout / pages.README
        readme.write_text(readme.read_text().replace(" × its time", "0 × its time", 1))
        assert pages.stale(checkout) == [readme]

    def test_other_results_are_seen_in_pages_and_pictures(self, checkout):
        path = checkout / "benchmarks" / "results" / "cpu.json"
        run = read(path)
        write(path, replace(run, records=tuple(replace(r, ratio=r.ratio and 1.5 * r.ratio) for r in run.records)))
        folder = checkout / pages.PICTURES / "cpu"
        assert pages.stale(checkout) == [
            checkout / pages.README,
            checkout / pages.DOCS,
            checkout / pages.TABLES,
            folder / "time-clipped_mean.png",
        ]

    def test_pictures_that_are_missing_or_left_over_are_seen_and_mended(self, checkout):
        folder = checkout / pages.PICTURES / "cpu"
        (folder / "memory-clipped_mean.png").rename(folder / "other.png")
        assert pages.stale(checkout) == [folder / "memory-clipped_mean.png", folder / "other.png"]
        pages.write(checkout)
        assert pages.stale(checkout) == []

    def test_each_machine_has_its_part(self, checkout):
        other = replace(read(checkout / "benchmarks" / "results" / "cpu.json"), environment={"gpu": "Invented GPU"})
        write(checkout / "benchmarks" / "results" / "another.json", other)
        pages.write(checkout)
        text = (checkout / pages.DOCS).read_text()
        assert re.findall("^## (.*)$", text, re.MULTILINE) == [
            "In short",
            "Invented CPU, threads: 2, torch 2.13.0, 2026-11-21",
            "Invented GPU",
        ]
        assert "| Invented GPU | " in text

    def test_readme_has_what_large_models_cost(self, checkout):
        """And what large layers cost beside gradients that are written out, and small networks with a first call."""
        record = Record("GPT-2 124M, T=128, B=4", "clipped_mean", "persample eager", "ok", ratio=1.23)
        record = replace(record, peak_bytes=3 * 2**20, unit_peak_bytes=2 * 2**20, median_s=1.0, unit_s=1.0)
        path = checkout / "benchmarks" / "results" / "large" / "cpu.json"
        path.parent.mkdir()
        write(path, Results({"cpu": "Another CPU"}, (record, replace(record, method="persample compiled"))))
        path = checkout / "benchmarks" / "results" / "cpu.json"
        wide = replace(record, workload=WIDE, ratio=1.5)
        small = replace(record, workload="TD(0) MLP 64, B=256", ratio=4.0)
        compiled = replace(small, method="persample compiled", ratio=0.9, first_call_s=7.5)
        run = read(path)
        others = tuple(r for r in run.records if r.workload != WIDE)
        new = (wide, replace(wide, method="torch.func", ratio=30.0), small, compiled)
        write(path, replace(run, records=others + new))
        pages.write(checkout)
        lines = [line for line in (checkout / pages.README).read_text().splitlines() if line.startswith("- ")]
        assert (
            lines[0] == "- GPT-2 124M from transformers, unpatched (T=128, B=4: 1.23 × its time, 1.50 of its memory)."
        )
        assert lines[1].startswith("- Large layers (wide MLP 5120, B=32): 1.50 × its time and 3 MiB; torch.func")
        assert lines[1].endswith("takes 30.0 × its time and 3 MiB.")
        assert lines[2].startswith("- A small network (TD(0) MLP 64, B=256): 4.00 × its time by the default engine")
        assert lines[2].endswith("compiled 0.90 × its time, after a first call of 7.50 s.")
        assert "Another CPU" in (checkout / pages.README).read_text()

    @pytest.mark.parametrize(
        "text", ["nothing", pages.BEGIN, f"{pages.END} {pages.BEGIN}", 2 * (pages.BEGIN + pages.END)]
    )
    def test_a_page_without_its_markers_is_an_error(self, checkout, text):
        (checkout / pages.README).write_text(text)
        with pytest.raises(ArgumentError, match=r"README.md: expected one pair of markers"):
            pages.stale(checkout)

    def test_a_lost_row_without_a_note_is_an_error(self, checkout, monkeypatch):
        monkeypatch.setattr(pages, "NOTES", {})
        with pytest.raises(ArgumentError, match=re.escape(f'none for\n    {LOST}: "",  # persample compiled, out=')):
            pages.stale(checkout)
        with pytest.raises(SystemExit, match=r"none for"):
            pages.main(checkout)

    def test_the_command_says_what_has_changed(self, checkout, capsys):
        (checkout / pages.README).write_text(f"{pages.BEGIN}{pages.END}")
        pages.main(checkout)
        assert capsys.readouterr().out == "written: README.md\n"
        pages.main(checkout)
        assert capsys.readouterr().out == "nothing has changed\n"
