"""The recipes of docs/architecture.md, applied to a copy of the repository exactly as they are written."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from paths import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
RECIPES = {part.splitlines()[0]: part for part in PAGE.split("\n## Recipe: a ")[1:]}
BLOCK = re.compile(r'^```(python|diff) title="(.+?)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^```sh\npython (.*?)\n```$", re.MULTILINE)


def add(text: str, diff: str) -> str:
    """Insert the lines marked + below the line before them, which is looked for from the last place on."""
    lines, at = text.splitlines(), 0
    for line in diff.splitlines():
        if line.startswith("+"):
            at += 1
            lines.insert(at, line[1:])
        else:
            at = lines.index(line[1:], at)
    return "\n".join(lines) + "\n"


def run(*args, folder):
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, *args], cwd=folder, env=env, capture_output=True, text=True, check=False)


EACH = """
import json, sys
import pytest
for args in json.loads(sys.argv[1]):
    print("ended with", int(pytest.main(args)), flush=True)
"""


def test_recipes(tmp_path):
    """All are applied to one copy, and their commands are run there, in one process."""
    for name in ("persample", "tests", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "conftest.py", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    files, commands = [], []
    for recipe in RECIPES.values():
        for kind, path, text in BLOCK.findall(recipe):
            target = tmp_path / path
            target.write_text(text if kind == "python" else add(target.read_text(), text))
            files += [path] if path.endswith(".py") else []
        (command,) = COMMAND.findall(recipe)
        commands.append(shlex.split(command.removeprefix("-m "))[1:])
    tests = run("-c", EACH, json.dumps(commands), folder=tmp_path)
    *outputs, rest = re.split("ended with 0\n", tests.stdout)
    assert (len(outputs), rest) == (len(commands), ""), tests.stdout + tests.stderr
    for output in outputs:
        passed = re.search(r"(\d+) passed", output)
        assert passed
        assert int(passed[1]) > 2
        assert "skipped" not in output
    for args in (("check",), ("format", "--check")):
        lint = run("-m", "ruff", *args, *files, folder=tmp_path)
        assert lint.returncode == 0, lint.stdout + lint.stderr


def test_every_recipe_is_tested():
    assert list(RECIPES) == ["new reduction", "new loss", "new factor", "rule for a new kind of layer"]


def test_adding_lines():
    assert add("a\nb\na\nc\n", " a\n+x\n+y\n c\n+z\n") == "a\nx\ny\nb\na\nc\nz\n"
    with pytest.raises(ValueError, match="not in list"):
        add("a\n", " b\n+x\n")
