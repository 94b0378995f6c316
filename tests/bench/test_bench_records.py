"""The records of a benchmark run: kept, compared, and compared with targets."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from bench_run import RUN, record

from benchmarks.report.files import merge, read, write
from benchmarks.report.outcomes import outcomes
from benchmarks.report.page import report
from benchmarks.report.records import FILL, GEMMS, UNIT, Record, Results, Target
from benchmarks.report.standings import check_notes, losses, standings
from benchmarks.report.summaries import losses_list, standings_grid
from persample.errors import ArgumentError


class TestFiles:
    def test_what_is_written_is_read(self, tmp_path):
        write(tmp_path / "run.json", RUN)
        assert read(tmp_path / "run.json") == RUN
        assert [path.name for path in tmp_path.iterdir()] == ["run.json"]

    def test_no_number_becomes_null(self, tmp_path):
        wrong = Record("w", "mean", "m", "wrong", "differs", error=float("nan"))
        write(tmp_path / "run.json", Results(records=(wrong,)))
        assert json.loads((tmp_path / "run.json").read_text())["records"][0]["error"] is None
        assert read(tmp_path / "run.json").records == (replace(wrong, error=None),)

    def test_an_interrupt_leaves_the_file_that_was_there(self, tmp_path, monkeypatch):
        path = tmp_path / "run.json"
        write(path, RUN)
        monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write(path, Results())
        assert read(path) == RUN

    def test_later_runs_replace_earlier_records_in_place(self):
        first, second = Results(records=RUN.records[:3]), replace(RUN.records[1], ratio=99.0)
        assert merge([first, Results(records=(second,))]).records == (RUN.records[0], second, RUN.records[2])
        assert merge([RUN, RUN]) == RUN

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("{", "JSONDecodeError"),
            ("[]", "TypeError"),
            ('{"environment": {}}', "KeyError: 'records'"),
            ('{"environment": {}, "records": [{"color": 1}], "scaling": [], "targets": []}', "'color'"),
            (None, "FileNotFoundError"),
        ],
    )
    def test_other_files_are_refused(self, tmp_path, text, why):
        if text is not None:
            (tmp_path / "run.json").write_text(text)
        with pytest.raises(ArgumentError, match=rf"results: expected a results file, received .*{why}"):
            read(tmp_path / "run.json")

    def test_unknown_words_are_refused(self):
        with pytest.raises(ArgumentError, match=r"status: expected 'ok' or 'wrong' or .*received 'good'"):
            Record("w", "mean", "m", "good")
        with pytest.raises(ArgumentError, match=r"measure: expected 'time' or .*received 'speed'"):
            Target("w", "mean", "m", 1.0, 3, "speed")


class TestStandings:
    @pytest.mark.parametrize(
        ("ours", "others", "verdict"),
        [
            ([0.9], [1.0], "ahead"),
            ([1.04], [1.0], "even"),
            ([0.96], [1.0], "even"),
            ([1.06], [1.0], "behind"),
            ([3.0, 0.9], [1.0, 7.0], "ahead"),
            ([3.0], [None], "alone"),
            ([None], [5.0], "behind"),
        ],
        ids=str,
    )
    def test_the_best_of_ours_against_the_best_of_others(self, ours, others, verdict):
        records = [record(f"persample {i}", ratio) for i, ratio in enumerate(ours)]
        records += [record(f"other {i}", ratio) for i, ratio in enumerate(others)]
        (standing,) = standings(Results(records=tuple(records)), "time")
        assert standing.verdict == verdict
        assert len(losses(Results(records=tuple(records)))) == (verdict == "behind")

    def test_what_nobody_can_is_nobodys(self):
        run = Results(records=(record("persample", None), record("other", None)))
        assert standings(run, "time") == standings(run, "memory") == []

    def test_limits_compete_with_nobody(self):
        run = Results(records=(record("persample", 2.0), record(FILL, 1.0), record(GEMMS, 1.0), record("other", 3.0)))
        assert standings(run, "time")[0].peer.method == "other"

    def test_the_batch_gradient_competes_where_it_has_a_result(self):
        run = Results(records=(record("persample", 2.0, "mean"), record(UNIT, 1.0, "mean"), record("o", 3.0, "mean")))
        assert losses(run)[0].peer.method == UNIT

    def test_memory_within_a_mebibyte_is_even(self):
        def verdicts(difference):
            run = Results(records=(record("persample", nbytes=2**20 + difference), record("other", nbytes=2**20)))
            return [standing.verdict for standing in standings(run, "memory")]

        assert verdicts(2**19) == ["even"]
        assert verdicts(2**21) == ["behind"]

    def test_memory_that_is_not_known_is_not_compared(self):
        run = Results(records=(record("persample", nbytes=None), record("other")))
        assert standings(run, "memory") == []

    def test_each_of_our_methods_by_itself(self):
        run = Results(records=(record("persample a", 0.5), record("persample b", 2.0), record("other", 1.0)))
        rows = {(method, measure): counts for method, measure, *counts in standings_grid(run).rows}
        assert rows["persample a", "time"] == ["0", "1", "0", "0"]
        assert rows["persample b", "time"] == ["0", "0", "0", "1"]

    def test_the_worst_come_first(self):
        factors = [standing.factor for standing in losses(RUN) if standing.measure == "time"]
        assert len(factors) > 3
        assert factors == sorted(factors, reverse=True)


class TestNotes:
    def test_every_lost_row_has_its_note_in_the_table(self):
        notes = {standing.key: f"because of {i}" for i, standing in enumerate(losses(RUN))}
        check_notes(losses(RUN), notes)
        listed = losses_list(RUN, notes)
        assert all(note in listed for note in notes.values())
        assert "because of 3" in report(RUN, "", notes)

    def test_a_row_without_a_note_is_an_error_that_says_which(self):
        lost, *others = losses(RUN)
        notes = {standing.key: "why" for standing in others}
        with pytest.raises(ArgumentError, match=re.escape(f'none for\n    {lost.key}: "",  # {lost.ours.method}')):
            report(RUN, "", notes)

    def test_a_note_without_its_row_is_an_error(self):
        notes = {standing.key: "why" for standing in losses(RUN)} | {("w", "gram", "time"): "old"}
        with pytest.raises(ArgumentError, match=r"one too many for\n    \('w', 'gram', 'time'\)"):
            report(RUN, "", notes)

    def test_where_we_fail_and_others_do_not_a_note_is_due(self):
        run = Results(records=(record("persample", None, status="too slow"), record("other")))
        with pytest.raises(ArgumentError, match="persample: too slow; other can"):
            check_notes(losses(run), {})

    def test_an_empty_note_is_none(self):
        lost = losses(RUN)
        with pytest.raises(ArgumentError, match="none for"):
            check_notes(lost, dict.fromkeys((standing.key for standing in lost), ""))


class TestTargets:
    RECORDS = (
        record("persample", 1.5, unit_peak_bytes=2**23, first_call_s=3.0),
        record("persample", 3.0, "clipped_mean"),
        record("JAX", 1.0, first_call_s=1.0),
        record("Opacus", None),
    )

    @pytest.mark.parametrize(
        ("options", "value", "met"),
        [
            ({}, 1.5, True),
            ({"limit": 1.4}, 1.5, False),
            ({"relative_to": "JAX"}, 1.5, True),
            ({"relative_to": "persample", "relative_quantity": "clipped_mean"}, 0.5, True),
            ({"measure": "memory"}, 2.0, True),
            ({"measure": "memory", "relative_to": "JAX"}, 1.0, True),
            ({"measure": "memory", "relative_to": None}, 2.0**24, False),
            ({"measure": "first call", "relative_to": None}, 3.0, False),
            ({"measure": "first call", "relative_to": "JAX"}, 3.0, False),
            ({"relative_to": None}, 1.5, True),
        ],
        ids=str,
    )
    def test_values(self, options, value, met):
        target = Target("w", "norms", "persample", options.pop("limit", 2.0), 3, **options)
        (outcome,) = outcomes(Results(records=self.RECORDS, targets=(target,)))
        assert (outcome.value, outcome.met) == (value, met)

    @pytest.mark.parametrize(
        ("method", "options", "reason"),
        [
            ("Opacus", {}, "Opacus: cannot: no idea"),
            ("nobody", {}, "nobody: not in this run"),
            ("persample", {"relative_to": "Opacus"}, "Opacus: cannot: no idea"),
            ("persample", {"measure": "first call"}, "not measured"),
        ],
    )
    def test_what_is_missing_is_not_met_and_says_why(self, method, options, reason):
        target = Target("w", "norms", method, 2.0, 3, **options)
        (outcome,) = outcomes(Results(records=self.RECORDS, targets=(target,)))
        assert (outcome.value, outcome.met, outcome.reason) == (None, False, reason)
