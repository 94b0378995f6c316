"""Files are data: nothing in them runs, and nothing is written outside of the folder that was named."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import pages
from benchmarks.report.files import read
from benchmarks.report.page import save_report
from persample import ArgumentError
from persample.cli.app import app
from persample.rl.training import TD0, Trainer, TrainingConfig, load_checkpoint, save_checkpoint


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return type(self.path).write_text, (self.path, "ran")


def trainer():
    return Trainer(TrainingConfig(TD0(), "persample/RandomWalk-v0"))


def resuming(path):
    with pytest.raises(ArgumentError, match=r"resume: expected a.* checkpoint, received"):
        load_checkpoint(trainer(), path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")  # of torch, before it refuses
@pytest.mark.parametrize("save", [torch.save, lambda x, path: path.write_bytes(pickle.dumps(x))], ids=["zip", "pickle"])
def test_checkpoints_are_not_unpickled(save, tmp_path):
    bomb = Bomb(tmp_path / "ran")
    save({"config": {}, "network": bomb}, tmp_path / "checkpoint.pt")
    resuming(tmp_path / "checkpoint.pt")
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(bomb))  # the bomb works
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, None) for name in ("network", "optimizer", "streams", "steps")),
        *((name, {"weight": torch.ones(2)}) for name in ("network", "optimizer", "streams")),
    ],
)
def test_checkpoints_of_other_things_are_refused(name, value, tmp_path):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(trainer(), path)
    state = torch.load(path, weights_only=True)
    if value is None:
        del state[name]
    else:
        state[name] = value
    torch.save(state, path)
    resuming(path)


def test_a_training_with_a_hostile_checkpoint_says_so_and_writes_nothing(tmp_path):
    torch.save({"config": Bomb(tmp_path / "ran")}, tmp_path / "checkpoint.pt")
    before = (tmp_path / "checkpoint.pt").read_bytes()
    done = CliRunner().invoke(app, ["train", "td0", "--output", str(tmp_path), "--resume"])
    assert done.exit_code
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


# Results of benchmarks

RECORD = {"workload": "TD(0)", "quantity": "mean", "method": "loop", "status": "ok", "median_s": 1.0, "ratio": 2.0}
POINT = {"method": "loop", "quantity": "mean", "batch_size": 2, "hidden": 4, "status": "ok", "median_s": 1.0}


def saved(folder, *, environment=None, records=(), scaling=()):
    path = folder / "results.json"
    found = {"environment": environment or {}, "records": [*records], "scaling": [*scaling], "targets": []}
    path.write_text(json.dumps(found), encoding="utf-8")
    return path


HOSTILE = {
    "a path": {"quantity": "x/../../../escaped"},
    "an absolute path": {"quantity": "/tmp/escaped"},
    "a script": {"workload": "<script>alert(1)</script>"},
    "a heading of its own": {"workload": "TD(0)\n# Mine"},
    "formulas": {"method": r"$\input{/etc/passwd}$"},
    "codes for terminals": {"method": "loop\x1b[2J"},
    "no text": {"quantity": ["mean"]},
    "unknown fields": {"__class__": "os.system"},
}


@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, kind) for case in HOSTILE for kind in ("records", "scaling")[: 1 + ("workload" not in HOSTILE[case])]],
)
def test_names_in_results_are_names(case, kind, tmp_path):
    fields = HOSTILE[case]
    path = saved(tmp_path, **{kind: [{**(RECORD if kind == "records" else POINT), **fields}]})
    with pytest.raises(ArgumentError, match="results: expected a results file"):
        read(path)


def test_an_environment_is_text_in_a_page(tmp_path):
    hostile = "<script>alert(1)</script>\n\n# Mine \x1b[2J"
    page, *_ = save_report(read(saved(tmp_path, environment={"cpu": hostile}, records=[RECORD])), tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "&lt;script&gt;" in text
    assert "<script>" not in text
    assert "\n# Mine" not in text
    assert "\x1b" not in text


def test_pages_are_written_in_their_folder_alone(tmp_path):
    for page in (pages.README, pages.DOCS):
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text(f"{pages.BEGIN}\n{pages.END}\n", encoding="utf-8")
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    outside = tmp_path / "escaped.png"
    outside.write_text("mine")
    record = {**RECORD, "quantity": "x/../../../../escaped"}
    saved(tmp_path / "benchmarks/results", records=[record])
    with pytest.raises(ArgumentError, match="quantity"):
        pages.write(tmp_path)
    assert outside.read_text() == "mine"
