"""The time of ``Project`` and ``Sketch`` alone, in units of their floor.

Run as ``python -m benchmarks.projections [eager|traced|compiled]``. The floor is one batch gradient and the products of
signals and inputs with the sign matrices of ``Project``. Times are CPU seconds of one thread, medians of alternating
calls, and of these the medians over three processes. The goal for ``Project`` is 1.2.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.alternating import medians, medians_of_processes
from benchmarks.workloads import build
from persample import Factored, Project, Sketch, per_sample_grads
from persample.factors import Conv, Embedding, Factor, Outer

SECONDS = 3
WORKLOADS = ("TD(0) MLP 256, B=256", "REINFORCE MLP 64, 32x200", "DQN Nature CNN, B=32")
DIMS = (16, 64, 256)


def operands(factor: Factor) -> Iterator[Tensor]:
    """Yield the matrices ``[n, columns]`` that are multiplied with signs."""
    factor = factor.patches() if isinstance(factor, Conv) else factor
    if isinstance(factor, Outer):
        yield from (factor.left.flatten(0, -2), factor.right.flatten(0, -2))
    elif isinstance(factor, Embedding):
        yield factor.signals.flatten(0, -2)
    else:
        yield factor.materialize().flatten(1)


def ratios(name: str, dim: int, engine: Any) -> list[float]:
    """Return the times of projections and of sketches of as many entries, over the floor."""
    torch.set_num_threads(1)
    work = build(name)
    call = work.loss_fn, work.model, work.batch
    parameters = [p for p in work.model.parameters() if p.requires_grad]
    factors = torch.utils._pytree.tree_leaves(
        per_sample_grads(*call, Factored()), is_leaf=lambda x: isinstance(x, Factor)
    )
    matrices = [x for factor in factors for x in operands(factor)]
    signs = [torch.ones(x.shape[1], dim) for x in matrices]

    def floor() -> None:
        torch.autograd.grad(work.batch_loss(work.model, *work.batch), parameters)
        for x, s in zip(matrices, signs, strict=True):
            x @ s

    wanted = {"project": Project(dim, seed=0), "sketch": Sketch(int(dim**0.5), seed=0)}
    calls = {name: lambda one=one: per_sample_grads(*call, one, engine=engine) for name, one in wanted.items()}
    times = medians({"floor": floor, **calls}, SECONDS)
    return [times[name] / times["floor"] for name in wanted]


def main(engine: Any = "eager") -> None:
    """Measure, and print a table in Markdown."""
    cells = list(itertools.product(WORKLOADS, DIMS))
    found = medians_of_processes(ratios, [(*cell, engine) for cell in cells])
    lines = [f"| {engine} | entries | Project | Sketch |", "| --- | ---: | ---: | ---: |"]
    rows = zip(cells, found, strict=True)
    lines += [f"| {name} | {dim} | {one:.2f} | {other:.2f} |" for (name, dim), (one, other) in rows]
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main(*sys.argv[1:2])
