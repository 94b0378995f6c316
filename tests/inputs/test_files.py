"""Files are data: nothing in them runs, and nothing is written outside of the folder that was named."""

from __future__ import annotations

import io
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import pages
from benchmarks.report.files import read
from benchmarks.report.page import save_report
from persample import ArgumentError, LossError, Norm, SinkError, accumulate, processes, read_sink
from persample.cli.app import app
from persample.cli.output import writable
from persample.factors import Dense, Outer, SumFactor
from persample.merge import Stacked, Summed
from persample.processes import Processes
from persample.rl.training import TD0, Trainer, load_checkpoint, save_checkpoint


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return type(self.path).write_text, (self.path, "ran")


def trainer():
    return Trainer(TD0(), "persample/RandomWalk-v0")


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


@pytest.mark.parametrize("value", [None, 3, "x", [], [1], {"a": 1}, torch.ones(2), -1.0], ids=repr)
@pytest.mark.parametrize(
    "where",
    [
        *("", "config", "config seed", "network", "network theta", "optimizer", "optimizer state", "streams", "steps"),
        *("history", "history 0", "history 0 loss", "returns", "optimizer state 0", "optimizer state 0 exp_avg"),
    ],
)
def test_checkpoints_with_values_of_other_kinds_are_refused(where, value, tmp_path):
    """Nothing that is loaded fails in a later update."""
    path, before = tmp_path / "checkpoint.pt", trainer()
    before.update()
    save_checkpoint(before, path)
    state = {"": torch.load(path, weights_only=True)}
    *way, last = ["", *where.split()] if where else [""]
    place = state
    for name in way:
        place = place[int(name) if name.isdigit() else name]
    last = int(last) if last.isdigit() else last
    place[last if last != "theta" else next(iter(place))] = value
    torch.save(state[""], path)
    after = trainer()
    try:
        load_checkpoint(after, path)
    except ArgumentError:
        return
    assert where.split()[0] in {"history", "returns", "optimizer", "steps"}
    after.update()


def test_a_training_with_a_hostile_checkpoint_says_so_and_writes_nothing(tmp_path):
    torch.save({"config": Bomb(tmp_path / "ran")}, tmp_path / "checkpoint.pt")
    before = (tmp_path / "checkpoint.pt").read_bytes()
    done = CliRunner().invoke(app, ["train", "td0", "--output", str(tmp_path), "--resume"])
    assert done.exit_code
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "directory"])
@pytest.mark.parametrize("name", ["metrics.csv", "checkpoint.pt", "checkpoint.pt.partial", "learning_curve.png"])
def test_a_training_writes_to_plain_files_alone(name, kind, tmp_path):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    outside.write_text("mine")
    make = {"pipe": os.mkfifo, "directory": os.mkdir}.get(
        kind, lambda path: path.symlink_to(outside if kind == "link" else tmp_path / "nowhere")
    )
    make(folder / name)
    for options in ([], ["--resume"]):
        command = [
            "train",
            "td0",
            "--env",
            "persample/RandomWalk-v0",
            "--steps",
            "1",
            "--output",
            str(folder),
            *options,
        ]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2
        assert f"({name} is {'a directory' if kind == 'directory' else 'no plain file'})" in done.output
    assert outside.read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("path", ["a\0b", "n" * 300, "a/" * 3000, "\ud800"], ids=["zero byte", "name", "path", "text"])
def test_paths_that_cannot_be(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    batches, norm = [torch.ones(2, 3)], Norm()
    with pytest.raises(ArgumentError, match="sink: expected a folder that can be written to, received"):
        accumulate(lambda w, x: w @ x, torch.ones(3), batches, norm, sink=path)
    with pytest.raises(SinkError, match="is no index of results"):
        read_sink(path)
    with pytest.raises(ArgumentError, match="output: expected a directory that can be written to, received"):
        writable(Path(path))
    with pytest.raises(ArgumentError, match="output: expected a directory that can be written to, received"):
        writable(tmp_path, path)
    resuming(Path(path))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("sink", [3, b"run", [], torch.ones(1)], ids=repr)
def test_what_is_no_path(sink):
    with pytest.raises(ArgumentError, match="sink: expected a folder that can be written to, received"):
        accumulate(lambda w, x: w @ x, torch.ones(3), [torch.ones(2, 3)], Norm(), sink=sink)


@pytest.mark.parametrize("module", [".", "..", ".package"])
def test_a_module_without_a_package(module):
    done = CliRunner().invoke(app, ["stats", f"{module}:task"])
    assert done.exit_code == 2
    assert "MODULE:FUNCTION: expected a function" in done.output


# Results of other processes


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: [x], lambda x: {"class": "persample.merge.Summed", "value": x}]
)
def test_results_of_other_processes_are_not_unpickled(wrap, tmp_path):
    buffer = io.BytesIO()
    torch.save(wrap(Bomb(tmp_path / "ran")), buffer)
    with pytest.raises(
        LossError,
        match="expected results of tensors and of classes known here from the other processes, received Unpick",
    ):
        processes._unpacked(buffer.getvalue(), [Summed(torch.ones(1))], Processes())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["subprocess.Popen", "builtins.eval", "persample.merge.Moments", None])
def test_results_of_other_processes_have_our_classes(name):
    buffer = io.BytesIO()
    torch.save([{"class": name, "args": "true"}], buffer)
    with pytest.raises(LossError, match="of classes known here from the other processes, received KeyError"):
        processes._unpacked(buffer.getvalue(), [Summed(torch.ones(1))], Processes())


def test_results_of_other_processes_are_restored():
    outer = Outer(torch.ones(2, 3, 4), torch.ones(2, 3, 5), (4, 5), torch.float32)
    rows = [Stacked(SumFactor((outer, Dense(torch.ones(2, 4, 5))))), Stacked(torch.ones(2), torch.float16)]
    own = [Stacked(Dense(torch.ones(0, 4, 5))), Stacked(torch.ones(0))]
    found = processes._unpacked(processes._packed(rows), own, Processes())
    assert found[0].rows.parts[0].param_shape == outer.param_shape
    assert torch.equal(found[0].rows.parts[0].right, outer.right)
    assert found[1].dtype == torch.float16


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
