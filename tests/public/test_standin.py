"""Another device without one: ``standin.py`` is a device in Python, on which every transfer to the host is counted.

``PYTHONPATH=tests python tests/public/test_standin.py`` writes the table of ``docs/devices.md`` from the counts.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import Part
from paths import TESTS

import persample as ps

PART = Part("devices.md", "table", "public/test_standin.py")
RANGE = "whether a coefficient is beyond 1e±30, so that the sum needs float64"
SOLVED = "whether the damping counts as 0"
# Every call that reads or writes across devices, what it reads and writes, and why; no other call does.
REASONS = {
    "ClippedSum(C)": (1, 0, RANGE),
    "ClippedMean(C)": (1, 0, RANGE),
    "ClippedMean(C, per_param=True)": (1, 0, RANGE),
    "WeightedSum(f)": (1, 0, RANGE),
    "Project(dim, seed)": (0, 8, "random signs are drawn on the CPU, two vectors for each parameter"),
    "Sketch(rank, seed)": (0, 6, "random signs are drawn on the CPU, two matrices or one for each parameter"),
    "NaturalGradient(λ)": (2, 0, f"{SOLVED}; {RANGE}"),
    "NaturalGradient(λ, previous=tree)": (2, 0, f"{SOLVED}; {RANGE}"),
    "NaturalGradient(λ, targets=function of aux)": (2, 0, f"{SOLVED}; {RANGE}"),
    "Leverage(λ)": (1, 0, SOLVED),
    "weights on the device": (1, 1, "weights are checked on the CPU"),
    "weights on the host": (0, 1, "weights are moved"),
    "batch of NumPy arrays": (0, 1, "arrays are moved"),
    "fisher_vector_product": (1, 0, RANGE),
    "composite_grads": (1, 0, "both passes are compared, once for each chunk"),
}
MOVED = {  # of reductions whose tensors are on the host
    "Dot(direction)": (0, 4),
    "Gram(other)": (0, 6),
    "CosineSimilarity(other)": (0, 6),
    "NaturalGradient(λ, targets)": (2, 2),
    "ClippedMean(C)": (1, 1),
}
ERRORS = {
    "batch on the host": r"LossError: loss_fn mixes devices in one operation \(standin:0: params.*; cpu: batch\)",
    "params on the host": r"LossError: loss_fn mixes devices in one operation \(cpu: params.*; standin:0: batch\)",
    "loop": r"LossError: loss_fn mixes devices in one operation",
    "out on the host": r"ArgumentError: out\['0.weight'\]: expected .* on standin:0, received .* on cpu",
    "generator of the host": r"RuntimeError: Expected a 'standin' device type for generator but found 'cpu'",
}


@functools.cache
def found():
    """What the calls transfer; a process of its own has the device."""
    script = TESTS / "standin_calls.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(ps.__file__).parents[1])}
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout)


def transferred(counts):
    return counts["read"], counts["write"]


def test_the_device_counts_every_transfer():
    counts = found()["host"]
    none = {"sum", "masked_fill", "where"}
    assert counts == {name: int(name not in none) for name in counts}
    assert none < counts.keys()


def test_no_reduction_waits_for_the_device_without_a_reason():
    counts = found()["reductions"]
    for call, transfers in counts.items():
        asked, _, model = call.partition(" of ") if "function of aux" not in call else call.rpartition(" of ")
        reads, writes, _ = REASONS.get(asked, (0, 0, ""))
        allowed = reads, writes if model.startswith("linear") or not writes else transfers["write"]
        assert transferred(transfers) == allowed, (call, transfers)
    assert len(counts) >= 150


def test_a_program_reads_one_flag():
    counts = found()["programs"]
    assert transferred(counts["unchecked, again"]) == (0, 0)
    assert transferred(counts["checked, first"]) == transferred(counts["checked, again"]) == (1, 0)


def test_options_transfer_what_they_must():
    counts = found()["options"]
    assert {name: transferred(x) for name, x in counts.items()} == {
        name: REASONS.get(name, (0, 0))[:2] for name in counts
    }
    assert len(counts) >= 10


def test_tensors_of_reductions_are_moved_to_the_device():
    assert {name: transferred(x) for name, x in found()["elsewhere"].items()} == MOVED


def test_a_device_without_float64_answers_what_the_page_says():
    refused = "TypeError: this device has no float64"
    answered = {
        "Stack()",
        "Sum()",
        "Dot(direction)",
        "Project(dim, seed)",
        "Sketch(rank, seed)",
        "Loss()",
        "Aux()",
        "Factored()",
        "chunk_size=2",
    }
    said = found()["without float64"]
    assert said == {name: "nothing" if name in answered else refused for name in said}
    assert answered < said.keys()


@pytest.mark.parametrize("case", ERRORS)
def test_tensors_of_two_devices_are_refused(case):
    assert re.match(ERRORS[case], found()["errors"][case])


def table():
    """Return the table as Markdown."""
    rows = {}
    for call, transfers in found()["reductions"].items():
        asked, _, model = call.rpartition(" of ")
        if model == "linear layers, eager":
            rows[f"`{asked}`"] = transfers
    options = found()["options"]
    rows |= {f"`{name}`" if name.isidentifier() else name: x for name, x in options.items() if name != "dropout"}
    lines = ["| call | reads | copies to the device | why |", "| --- | --- | --- | --- |"]
    for name, x in rows.items():
        lines.append(f"| {name} | {x['read']} | {x['write']} | {REASONS.get(name.strip('`'), ('', '', ''))[2]} |")
    return "\n".join(lines) + "\n"


def test_the_page_shows_this_table():
    PART.assert_is(table())


if __name__ == "__main__":
    PART.write(table())
