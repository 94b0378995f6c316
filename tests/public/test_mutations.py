"""Faults that the grid finds: each is one line of persample, changed on purpose.

A grid of pairs finds what the product of all models, reductions, engines and dtypes found. To see it, run
``python -m pytest tests/public/test_mutations.py -m slow``; a smaller grid must find them, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import NamedTuple

import pytest
from paths import ROOT

GRID = ("tests/public/test_grid.py", "tests/engines/compiled/test_traced.py", "-k", "equals_the_loop")


class Mutation(NamedTuple):
    """A part of a file of persample, and what takes its place."""

    file: str
    old: str
    new: str


MUTATIONS = {
    "a gradient that is not clipped is longer than before": Mutation(
        "reductions/sums.py", "return (limit / norms).masked_fill_(kept, 1)", "return limit / norms"
    ),
    "an inner product of written-out gradients": Mutation(
        "factors/contractions.py", "return rows @ others.T", "return rows.abs() @ others.T"
    ),
    "a projection of written-out gradients": Mutation(
        "factors/contractions.py", "left.to(rows.dtype).T, 1)", "left.to(rows.dtype).T.abs(), 1)"
    ),
    "an inner product of outer products": Mutation(
        "factors/outer.py", "left[0] * right[0] if", "left[0] + right[0] if"
    ),
    "a sum of outer products without its weights": Mutation(
        "factors/outer.py", "left = numerics.scaled_rows(left, weights, dtype)", "left = left.to(dtype)"
    ),
    "a variance of outer products": Mutation("factors/outer.py", "- 2 * center * self", "- center * self"),
    "kernels of other samples": Mutation(
        "factors/conv.py", "return grads.view(size, *shape)", "return grads.view(size, *shape).flip(0)"
    ),
    "a row of a table that is looked up twice": Mutation(
        "factors/embedding.py", "(rows[1:] != rows[:-1]).long()", "torch.ones_like(rows[1:])"
    ),
    "a variance of rows of a table": Mutation("factors/embedding.py", " - middle[row].square()", ""),
    "a norm of the largest parameter alone": Mutation(
        "gradients.py", "torch.stack([first, *others]).sum(0)", "torch.stack([first, *others]).amax(0)"
    ),
    "a variance of chunks without their means": Mutation(
        "merge.py", "delta.square() * (self.n * share)", "0 * delta.square()"
    ),
    "rows of chunks out of order": Mutation(
        "merge.py", "rows: list[Leaf] = [self.rows, *self.tail]", "rows: list[Leaf] = [*self.tail, self.rows]"
    ),
    "a layer whose input has no gradient": Mutation(
        "engines/layers/interceptor.py",
        "(found := self.vmap.rows(input)) is not None and _fits",
        "(found := self.vmap.rows(input.detach())) is not None and _fits",
    ),
    "two views of a program that are taken for one": Mutation(
        "engines/compiled/straight.py", 'f"{node.target}{node.args}"', 'f"{node.target}{node.args[0]}"'
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_changed_is_there(name):
    file, old, _ = MUTATIONS[name]
    assert (ROOT / "persample" / file).read_text().count(old) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_grid_finds(name, tmp_path):
    file, old, new = MUTATIONS[name]
    for folder in ("persample", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "persample" / file).write_text((tmp_path / "persample" / file).read_text().replace(old, new))
    command = [sys.executable, "-m", "pytest", "-p", "no:benchmark", "--quiet", "--exitfirst", "--tb=no", *GRID]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{tmp_path / 'tests'}"}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    assert " failed" in run.stdout
