"""Measure one GPU: ``python -m benchmarks.gpu``, nine minutes at most, one file in ``benchmarks/results/gpu/``.

Rows are measured one after the other, the important ones first, until the time is over; those left out are printed. The
same command again adds them to the file. ``--device cpu --tiny`` runs the same code with tiny models.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import benchmarks.older_torch  # noqa: F401 - before persample
from benchmarks.process import ROOT, FailedError, Process
from benchmarks.report.files import merge, read, write
from benchmarks.report.records import UNIT, Record, Results
from benchmarks.session import check_same

RESULTS = ROOT / "benchmarks/results/gpu"
# What one row may take, as a graph of a large model compiles for a minute; and its timed calls.
ROW_SECONDS, TIMED_SECONDS = 150.0, 0.7
# Seconds kept for the end of the run.
SPARE = 10.0

GPT2, RESNET, VIT = "GPT-2 124M, T=1024, B=16", "ResNet-50, 224², B=64", "ViT-S/16, 224², B=64"
SUITE = (
    "TD(0) MLP 64, B=1024",
    "TD(0) MLP 256, B=1024",
    "DQN Nature CNN, B=32",
    "sweep 01, CNN: B=68, T=16, width 120, layers 2",
    "sweep 04, transformer: B=38, T=50, width 128, layers 1",
    "GRU policy, 32x50",
    "REINFORCE MLP 256, 32x200",
)
ENGINES = ("eager", "traced", "compiled")
PLAIN = (("mean", UNIT), ("mean", f"{UNIT} compiled"))
OURS = tuple(("step", f"persample {engine}") for engine in ENGINES)
VALIDATED = tuple((f"step_{product}", f"persample {engine}") for engine in ENGINES for product in ("gram", "dot"))
OPACUS = (("clipped_mean", "Opacus ghost clipping"), ("clipped_mean", "Opacus hooks"))
SMALL = tuple(("clipped_mean", f"persample {engine}") for engine in ENGINES)
NATURAL = tuple(("natural_gradient", f"persample {engine}") for engine in ENGINES)


class Row(NamedTuple):
    """A row of the table: a method, a workload in a dtype, and a quantity."""

    workload: str
    dtype: str
    quantity: str
    method: str

    @property
    def key(self) -> tuple[str, str, str]:
        """The key of its record."""
        return f"{self.workload}, {self.dtype}", self.quantity, self.method


def rows(*, tiny: bool = False) -> Iterator[Row]:
    """List the rows, the important ones first; of each workload the unit comes before the methods."""
    if tiny:
        yield from _of("tiny GPT-2", "float32", (PLAIN[0], *OURS[:2], *VALIDATED[:2]))
        yield from _of("tiny GPT-2", "bfloat16", (PLAIN[0], OURS[0]))
        yield from _of("TD(0) MLP 16, B=5", "float32", (*PLAIN, SMALL[2], NATURAL[0]))
        for workload in ("tiny ResNet", "tiny ViT"):
            yield from _of(workload, "float32", (PLAIN[0], OURS[0], *OPACUS))
        return
    yield from _of(GPT2, "bfloat16", PLAIN + OURS + VALIDATED[:4])
    for workload in (RESNET, VIT):
        yield from _of(workload, "bfloat16", (PLAIN[0], *OURS[:2], *OPACUS))
    for workload in SUITE:
        yield from _of(workload, "float32", (PLAIN[0], SMALL[0], SMALL[2]))
    yield from _of(SUITE[1], "float32", (NATURAL[0], NATURAL[2]))
    for workload in (GPT2, RESNET, VIT):
        yield from _of(workload, "float32", (PLAIN[0], *OURS[:2], *OPACUS))
    for workload in (VIT, RESNET):
        yield from _of(workload, "bfloat16", (PLAIN[1], OURS[2]))
    for workload in (GPT2, VIT, RESNET):
        yield from _of(workload, "float32", (PLAIN[1], OURS[2]))
    yield from _of(GPT2, "bfloat16", VALIDATED[4:])
    for workload in SUITE:
        yield from _of(workload, "float32", SMALL[1:2])


def _of(workload: str, dtype: str, measured: tuple[tuple[str, str], ...]) -> Iterator[Row]:
    return (Row(workload, dtype, quantity, method) for quantity, method in measured)


class Run:
    """One run over the rows.

    Args:
        device: the device, by torch's name.
        end: when it is over, on ``time.monotonic``'s clock.
        path: the results file; None: named after the GPU.
    """

    def __init__(self, device: str, end: float, path: Path | None):
        self._device, self._end = device, end
        self._process = self._started()
        environment = self._process.about
        name = re.sub(r"[^a-z0-9]+", "-", (environment["gpu"] or device).lower())
        self.path = path or RESULTS / f"{name}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.results = Results(environment)
        if self.path.exists():
            before = read(self.path)
            check_same(self.path, before.environment, environment)
            self.results = merge([before, self.results])

    def _started(self) -> Process:
        return Process("torch", command=("benchmarks.card", self._device))

    def measure(self, wanted: list[Row]) -> list[Row]:
        """Measure what the file lacks, and return the rows for which there was no time."""
        done = {record.key for record in self.results.records}
        todo = [row for row in wanted if row.key not in done]
        for place, row in enumerate(todo):
            left = self._end - time.monotonic()
            if left < SPARE:
                return todo[place:]
            record = self._measured(row, min(ROW_SECONDS, left - SPARE / 2))
            self.results = merge([self.results, Results(records=(record,))])
            write(self.path, self.results)
            print(f"{', '.join(record.key)}: {record.words}", flush=True)
        return []

    def _measured(self, row: Row, seconds: float) -> Record:
        if not self._process.is_alive:
            self.close()
            self._process = self._started()
        try:
            record = Record(
                *row.key, "ok", **self._process.ask("measure", seconds, seconds=TIMED_SECONDS, **row._asdict())
            )
        except FailedError as failed:
            if self._process.used:  # an error of a kernel leaves nothing of the process that could be trusted
                self.close()
            return Record(*row.key, failed.status, failed.reason, error=failed.error)
        units = [x for x in self.results.records if x.key == (row.key[0], "mean", UNIT) and x.median_s]
        unit = record if row.method == UNIT else units[0] if units else None
        if unit is None:
            return record
        ratio = record.median_s / unit.median_s
        return replace(record, unit_s=unit.median_s, ratio=ratio, unit_peak_bytes=unit.peak_bytes)

    def close(self) -> None:
        """End the process."""
        self._process.end()


def main(arguments: list[str] | None = None) -> Results:
    """Measure, print each row, and return all results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="torch's name of the device")
    parser.add_argument("--tiny", action="store_true", help="tiny models, in seconds on a CPU")
    parser.add_argument("--minutes", type=float, default=8.75, help="after which the run ends")
    parser.add_argument("--only", default="", help="text in the label of each row")
    parser.add_argument("--results", type=Path, help="the JSON file; rows that are in it are not measured again")
    asked = parser.parse_args(arguments)
    end = time.monotonic() + 60 * asked.minutes
    wanted = [row for row in rows(tiny=asked.tiny) if asked.only in ", ".join(row.key)]
    run = Run(asked.device, end, asked.results)
    try:
        left_out = run.measure(wanted)
    finally:
        run.close()
    print(f"Results: {run.path}")
    for row in left_out:
        print(f"No time was left for {', '.join(row.key)}")
    return run.results


if __name__ == "__main__":
    main()
