"""The command that measures a GPU, with tiny models on the CPU: its rows, its budget, its results, and their table."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import card, gpu, pages, stopwatch
from benchmarks.card import Card
from benchmarks.oracle import reference
from benchmarks.report.cards import card_table
from benchmarks.report.files import read, write
from benchmarks.report.records import UNIT, Record, Results
from benchmarks.workloads import CARD, build


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpu") / "tiny.json"
    with pytest.MonkeyPatch.context() as patch:  # however busy the machine is
        patch.setattr(gpu, "ROW_SECONDS", 3600.0)
        patch.setattr(gpu, "TIMED_SECONDS", 0.0)
        found = gpu.main(["--device", "cpu", "--tiny", "--minutes", "600", "--results", str(path)])
    assert read(path) == found
    return found


def test_every_tiny_row_agrees_with_the_loop_and_has_all_figures(results):
    assert [record.key for record in results.records] == [row.key for row in gpu.rows(tiny=True)]
    for record in results.records:
        assert record.status == "ok", record.words
        assert record.error < (1e-5 if "float32" in record.workload else card.TOLERANCE["bfloat16"])
        assert min(record.median_s, record.first_call_s, record.kernel_s) > 0
        assert card.ROUNDS[0] <= record.rounds <= card.ROUNDS[1]
        assert record.ratio == pytest.approx(record.median_s / record.unit_s)
    assert {"gpu", "cpu", "torch", "date"} <= results.environment.keys()


def test_rows_of_a_gpu_have_their_unit_before_them():
    rows, known = list(gpu.rows()), set()
    assert len(set(rows)) == len(rows)
    assert {row.workload for row in rows} >= {*CARD, *gpu.SUITE}
    for row in rows:
        known |= {row.key[0]} if row.method == UNIT else set()
        assert row.key[0] in known, row


def test_without_time_the_rows_left_out_are_printed_and_what_is_known_stays(tmp_path, capsys, results):
    path = tmp_path / "some.json"
    write(path, replace(results, records=results.records[:2]))
    found = gpu.main(["--device", "cpu", "--tiny", "--minutes", "0", "--results", str(path)])
    assert found.records == results.records[:2]
    said = capsys.readouterr().out.splitlines()
    assert len([line for line in said if line.startswith("No time was left for ")]) == len(results.records) - 2


def test_a_row_that_takes_too_long_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "ROW_SECONDS", 0.0)
    only = ["--only", "tiny ViT, float32, mean"]
    (record,) = gpu.main(["--device", "cpu", "--tiny", *only, "--results", str(tmp_path / "x.json")]).records
    assert (record.status, record.reason) == ("too slow", "took more than 0 s")


class TestCard:
    def test_wrong_gradients_are_told(self, monkeypatch):
        monkeypatch.setattr(card, "reference", lambda *args: _scaled(reference(*args), 1.5))
        answer = Card("cpu").measure("tiny ViT", "float32", "step", "persample eager")
        assert answer["status"] == "wrong"
        assert answer["error"] == pytest.approx(1 / 3, rel=1e-4)

    @pytest.mark.parametrize("quantity", ["step_gram", "step_dot"])
    def test_wrong_products_with_validation_gradients_are_told(self, quantity, monkeypatch):
        product = Card._product
        monkeypatch.setattr(Card, "_product", lambda self: 2 * product(self))
        answer = Card("cpu").measure("tiny GPT-2", "float32", quantity, "persample eager")
        assert answer["error"] == pytest.approx(0.5, rel=1e-4)

    def test_a_library_that_is_not_there_is_a_reason(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "benchmarks.methods.opacus_", None)
        with pytest.raises(card.CannotError, match="opacus_"):
            Card("cpu").measure("tiny ViT", "float32", "clipped_mean", "Opacus hooks")


def _scaled(found, scale):
    return {name: scale * x for name, x in found.items()} if isinstance(found, dict) else scale * found


def test_large_models_have_the_sizes_of_their_names():
    sizes = {"ResNet-50, 224², B=64": 25.6e6, "ViT-S/16, 224², B=64": 22e6}
    for name, expected in sizes.items():
        with torch.device("meta"):
            work = CARD[name]()
            assert work.batch_loss(work.model, *work.batch).shape == ()
        assert sum(p.numel() for p in work.params.values()) == pytest.approx(expected, rel=0.01)


def test_validation_samples_are_others_and_move_with_the_batch():
    work = build("tiny GPT-2").to("meta")
    assert {x.device.type for x in (*work.batch, *work.held_out)} == {"meta"}
    assert [len(x) for x in (*work.batch, *work.held_out)] == [3, 2]


def test_operators_are_counted_as_kernels():
    x = torch.randn(200, 200)
    once, thrice = (stopwatch.kernel_seconds(lambda n=n: [x @ x for _ in range(n)]) for n in (1, 60))
    assert 0 < once < thrice


def test_a_run_on_a_gpu_replaces_the_figures_of_the_page(tmp_path):
    failed = Record("ViT, bfloat16", "clipped_mean", "Opacus hooks", "cannot", "no module")
    known = replace(failed, method=UNIT, quantity="mean", status="ok", reason="", median_s=0.02, kernel_s=0.01)
    step = replace(known, quantity="step", method="persample traced", ratio=1.2, peak_bytes=3, unit_peak_bytes=2)
    run = Results({"gpu": "Invented GPU"}, (known, replace(known, workload="other"), failed, step))
    rows = [line for line in card_table(run).splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[0] for row in rows] == 3 * ["| ViT, bfloat16"] + ["| other"]
    assert rows[1] == "| ViT, bfloat16 | clipped mean | Opacus hooks | cannot | no module |  |  |  |  |"
    assert rows[2] == (
        "| ViT, bfloat16 | clipped mean and norms | persample traced | 20.0 ms | 1.20 | 10.0 ms | 0 KiB | 1.50 | – |"
    )
    (tmp_path / "benchmarks/results/gpu").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    for page in (pages.README, pages.DOCS, pages.TABLES, pages.GPU):
        (tmp_path / page).write_text(f"{pages.BEGIN}\nearlier\n{pages.END}\n")
    pages.write(tmp_path)
    assert "earlier" in (tmp_path / pages.GPU).read_text()
    write(tmp_path / "benchmarks/results/gpu/invented.json", run)
    pages.write(tmp_path)
    assert "Invented GPU" in (tmp_path / pages.GPU).read_text()
    assert "earlier" not in (tmp_path / pages.GPU).read_text()
