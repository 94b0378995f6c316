"""``persample stats``, alone and under ``torchrun``; the bar of ``accumulate``."""

from __future__ import annotations

import builtins
import io
import json
import os
import subprocess
import sys

import pytest
import rich.console
import torch
from oracle import oracle
from paths import ROOT
from typer.testing import CliRunner

from persample import ArgumentError, Leverage, Mean, accumulate, per_sample_grads
from persample.cli.app import app

SOURCE = """
import torch

def loss(model, x, y):
    return torch.nn.functional.cross_entropy(model(x), y)

def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(101, 8, generator=generator), torch.randint(3, (101,), generator=generator)

def model():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 3)

def task(rank, world):
    x, y = data()
    return loss, model(), list(zip(x[rank::world].split(10), y[rank::world].split(10)))

def lost(rank, world):
    return (lambda w, x: w * x), torch.ones(()), [torch.tensor([1.0, -1.0])]

def wrong(rank, world):
    return loss

def alone():
    return loss

number = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "own_task.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "own_task", raising=False)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, ["stats", *map(str, arguments)])


def check(report, own_task):
    rows = oracle(own_task.loss, own_task.model(), own_task.data())
    gradients = torch.cat([g.flatten(1) for g in rows.grads], 1)
    norms = gradients.norm(dim=1)
    trace = gradients.var(0).sum()
    squared = gradients.mean(0).square().sum() - trace / 101
    assert report["samples"] == 101
    assert report["norm_quantiles"]["0.5"] == pytest.approx(norms.median().item(), rel=1e-5)
    assert report["norm_quantiles"]["1"] == pytest.approx(norms.max().item(), rel=1e-5)
    assert report["noise_scale"] == pytest.approx((trace / squared).item(), rel=1e-4)
    assert report["critical_batch_size"] == -int(-(trace / squared) // 1)
    assert report["mean_loss"] == pytest.approx(rows.losses.mean().item(), rel=1e-5)
    assert [one["index"] for one in report["top"]] == norms.argsort(descending=True)[:3].tolist()
    assert report["top"][0]["loss"] == pytest.approx(rows.losses[norms.argmax()].item(), rel=1e-5)
    exact = per_sample_grads(
        own_task.loss, own_task.model(), own_task.data(), Leverage(1e-3 * norms.square().mean().item())
    )
    found = [one["leverage"] for one in report["top_leverage"]]
    assert found == sorted(found, reverse=True)
    assert report["top_leverage"][0]["index"] in exact.topk(5).indices
    assert found == pytest.approx([exact[one["index"]].item() for one in report["top_leverage"]], rel=0.1)


def test_prints_a_table_and_writes_a_report_and_a_figure(here):
    result = run("own_task:task", "--top", 3, "--output", here / "out")
    assert result.exit_code == 0, result.output
    import own_task

    report = json.loads((here / "out" / "stats.json").read_text())
    check(report, own_task)
    assert "norm, quantile 0.99" in result.output
    assert f"{report['critical_batch_size']}" in result.output
    assert f"{report['top'][0]['index']}" in result.output
    assert "highest leverages" in result.output
    assert (here / "out" / "stats.png").read_bytes().startswith(b"\x89PNG")


def test_under_torchrun_is_the_same(here):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{here}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "persample", "stats", "own_task:task", "--top", "3", "--output", str(here / "out")]
    done = subprocess.run(command, env=environment, cwd=here, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    import own_task

    report = json.loads((here / "out" / "stats.json").read_text())
    assert report["processes"] == 2
    check(report, own_task)
    assert done.stdout.count("per-sample gradients") == 1


def test_a_mean_that_is_lost_in_the_noise_has_no_batch_size(here):
    result = run("own_task:lost", "--top", 0)
    assert result.exit_code == 0, result.output
    assert "none: the mean is lost in the noise" in result.output
    assert "largest gradients" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["own_task"], "MODULE:FUNCTION: expected a function, received module"),
        (["no_such_module:f"], "expected a function, received No module named 'no_such_module'"),
        (["own_task:nothing"], "expected a function, received module 'own_task' has no attribute 'nothing'"),
        (["own_task:wrong"], "own_task:wrong: expected a function that returns (loss_fn, params, batches)"),
        (["own_task:number"], "expected a function, received int"),
        (["own_task:alone"], "own_task:alone: expected a function of (rank, world), received too many positional"),
        (["own_task:task", "--top", "-1"], "Invalid value for '--top'"),
        (["own_task:task", "--dim", "0"], "dim: expected"),
        (["own_task:task", "--engine", "fast"], "'fast' is not one of 'eager', 'traced'"),
    ],
)
def test_invalid_input_is_one_line(here, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


class TestProgress:
    batches = torch.randn(6, 3).split(2)

    def shown(self, monkeypatch, *, terminal, batches=None):
        stream = io.StringIO()
        original = rich.console.Console
        options = {"file": stream, "force_terminal": terminal, "width": 100}
        monkeypatch.setattr(rich.console, "Console", lambda **_: original(**options))
        accumulate(lambda w, x: w @ x, torch.zeros(3), batches or self.batches, Mean(), progress=True)
        return stream.getvalue()

    def test_shows_batches_rate_and_time(self, monkeypatch):
        text = self.shown(monkeypatch, terminal=True)
        assert "3/3" in text
        assert "samples/s" in text

    def test_of_unknown_length(self, monkeypatch):
        assert "3/?" in self.shown(monkeypatch, terminal=True, batches=iter(self.batches))

    def test_is_silent_in_pipes(self, monkeypatch):
        assert not self.shown(monkeypatch, terminal=False)

    def test_without_rich(self, monkeypatch):
        original = builtins.__import__

        def without(name, *args, **options):
            if name.startswith("rich"):
                raise ImportError("No module named 'rich'")
            return original(name, *args, **options)

        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(ArgumentError, match="progress: expected rich to be installed, received No module named"):
            accumulate(lambda w, x: w @ x, torch.zeros(3), self.batches, Mean(), progress=True)
