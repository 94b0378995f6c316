"""The time of ``accumulate``, in units of one call of ``per_sample_grads`` for each batch.

Run as ``python -m benchmarks.streams [eager|traced|compiled]``. Times are CPU seconds of one thread, medians of
alternating passes, and of these the medians over three processes. The results of the single calls are thrown away: to
merge them is part of what ``accumulate`` does in the same time. The goal is 1.05.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.alternating import medians, medians_of_processes
from benchmarks.models import mlp
from persample import ClippedMean, Variance, accumulate, per_sample_grads

SECONDS = 4
BATCHES = (20, 80)
WIDTHS = (64, 256, 512)
REDUCTIONS = {"clipped mean": ClippedMean(1.0), "variance": Variance()}


def loss(model: nn.Module, x: Tensor) -> Tensor:
    """Return the loss of one sample."""
    return model(x).square().sum()


def ratio(number: int, reduction_name: str, width: int, engine: Any) -> list[float]:
    """Return the time of a stream over that of single calls, in a list."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, reduction = mlp(8, width, width, 1), REDUCTIONS[reduction_name]
    batches = torch.randn(number * 256, 8).split(256)

    def single() -> None:
        for x in batches:
            per_sample_grads(loss, model, x, reduction, engine=engine)

    times = medians(
        {"single": single, "stream": lambda: accumulate(loss, model, batches, reduction, engine=engine)}, SECONDS
    )
    return [times["stream"] / times["single"]]


def main(engine: Any = "compiled") -> None:
    """Measure, and print a table in Markdown."""
    cells = list(itertools.product(REDUCTIONS, WIDTHS))
    columns = [f"{name}, MLP {width}" for name, width in cells]
    lines = [f"| {engine} | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    for number in BATCHES:
        ratios = medians_of_processes(ratio, [(number, *cell, engine) for cell in cells])
        lines.append(f"| {number} batches | {' | '.join(f'{x:.2f}' for [x] in ratios)} |")
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main(*sys.argv[1:2])
