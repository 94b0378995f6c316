"""Persample beside other versions of Python, NumPy, torch and its neighbours; writes the table of docs/ecosystem.md.

    python tests/neighbours.py            # every row
    python tests/neighbours.py 3.11       # those of one Python

Each row is an environment of its own, which is removed afterwards: a CUDA build of torch takes 5.4 GB.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from paths import ROOT

PAGE = ROOT / "docs" / "ecosystem.md"
NEIGHBOURS = ["torch", "numpy", "gymnasium", "torchrl", "tensordict", "transformers", "peft"]
OTHERS = ["minari[hdf5]", "pillow", "stable-baselines3", "torchdiffeq", "pytest>=9", "hypothesis", "sybil"]
TESTS = [
    *("tests/inputs/test_inputs.py", "tests/public/test_ecosystem.py"),
    *("tests/public/test_transformers.py", "tests/rl/test_rollouts.py"),
]
ROWS = [
    ("3.10", "torch==2.13.0", "numpy<2"),
    ("3.10", "torch", "numpy"),
    ("3.11", "torch==2.13.0", "numpy<2"),
    ("3.11", "torch", "numpy"),
    ("3.12", "torch", "numpy"),
    ("3.13", "torch", "numpy"),
    ("3.14", "torch", "numpy"),
]
VERSIONS = "import importlib.metadata as m, json, sys; print(json.dumps([m.version(x) for x in sys.argv[1:]]))"


def interpreter(python: str) -> str | None:
    """Return the path of a Python of this version, installed by the system or by pyenv."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{python}.*/bin/python"))  # its shims run the chosen version only
    every = [*map(str, pyenv), shutil.which(f"python{python}")]
    runs = lambda path: path and not subprocess.run([path, "--version"], capture_output=True, check=False).returncode
    return next(filter(runs, every), None)


def row(python: str, torch: str, numpy: str) -> str:
    """Return a row of the table: the installed versions, and the last line of pytest."""
    found = interpreter(python)
    if found is None:
        return f"| {python} | {' | '.join(['–'] * len(NEIGHBOURS))} | not tried: no such Python on this machine |"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([found, "-m", "venv", folder], check=True)
        own = f"{folder}/bin/python"
        wanted = [torch, numpy, *NEIGHBOURS[2:], *OTHERS]
        install = subprocess.run(
            [own, "-m", "pip", "install", "--quiet", *wanted], capture_output=True, text=True, check=False
        )
        if install.returncode:
            reason = install.stderr.strip().splitlines()[-1]
            return f"| {python} | {' | '.join(['–'] * len(NEIGHBOURS))} | not installed: {reason} |"
        asked = [own, "-c", VERSIONS, *NEIGHBOURS]
        versions = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
        tests = [own, "-m", "pytest", "--quiet", "-o", "filterwarnings=default", *TESTS]
        print(out := subprocess.run(tests, capture_output=True, text=True, check=False, cwd=ROOT).stdout[-3000:])
        counts = ", ".join(re.findall(r"\d+ (?:passed|failed|errors?)", out.strip().splitlines()[-1]))
        return f"| {python} | {' | '.join(versions)} | {counts} |"


def write(rows: list[str]) -> None:
    """Put rows into the page; those of other Pythons stay."""
    text = PAGE.read_text()
    before, start, rest = text.partition("<!-- neighbours: make neighbours -->\n")
    _, end, after = rest.partition("<!-- /neighbours -->\n")
    head = f"| Python | {' | '.join(NEIGHBOURS)} | tests |", "|" + " --- |" * (len(NEIGHBOURS) + 2)
    done = {line.split(" | ")[0].strip("| ") for line in rows}
    old = [
        line for line in rest.splitlines() if line.startswith("| 3.") and line.split(" | ")[0].strip("| ") not in done
    ]
    table = sorted([*old, *rows], key=lambda line: int(re.findall(r"\| 3\.(\d+)", line)[0]))
    PAGE.write_text(before + start + "\n".join([*head, *table]) + "\n" + end + after)


if __name__ == "__main__":
    write([row(*versions) for versions in ROWS if len(sys.argv) < 2 or versions[0] in sys.argv[1:]])
