"""Draws the kinds and sizes of the sweep's workloads.

Sizes are drawn uniformly in their logarithms: B from 4 to 1024, T from 1 to 256, the width from 16 to 512, 1 to 6
layers. Kinds take turns. Of MLP and functional code, every other draw has T = 1; images have at least 16 pixels. Of a
draw with more work than LARGEST_WORK, B, T or the width is halved, whichever is drawn, until it is within. Then the
width becomes a multiple of 8, and the T pixels of an image a square.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

COUNT, SEED = 40, 0
# Kind → weights of a layer in units of width².
KINDS = {"MLP": 1, "CNN": 9, "GRU": 6, "LSTM": 8, "transformer": 12, "LoRA": 12, "graph network": 2, "functional": 1}
ONE_STEP, RECURRENT = ("MLP", "functional"), ("GRU", "LSTM")
RANGES = {"batch_size": (4, 1024), "steps": (1, 256), "width": (16, 512), "layers": (1, 6)}
SMALLEST_IMAGE = 16
# Multiply-adds of one forward pass: a batch gradient then takes about 0.1 s on one core.
LARGEST_WORK = 2**29
# T times layers of a recurrent network: compilers unroll it, and take about a second per step and layer.
MOST_UNROLLED = 64


@dataclass(frozen=True)
class Draw:
    """Kind and sizes of a workload.

    Args:
        number: the place in the sweep.
        kind: one of KINDS.
        batch_size: samples B.
        steps: T, the uses of a weight in one sample: steps, tokens, pixels, nodes.
        width: features of every layer.
        layers: the number of layers before the last, linear one.
    """

    number: int
    kind: str
    batch_size: int
    steps: int
    width: int
    layers: int

    @property
    def name(self) -> str:
        """The name of the workload."""
        sizes = f"B={self.batch_size}, T={self.steps}, width {self.width}, layers {self.layers}"
        return f"sweep {self.number:02d}, {self.kind}: {sizes}"

    @property
    def work(self) -> int:
        """The multiply-adds of one forward pass, roughly."""
        return self.batch_size * self.steps * self.layers * KINDS[self.kind] * self.width**2


def draws(count: int = COUNT, seed: int = SEED) -> Iterator[Draw]:
    """Draw workloads; the same seed gives the same ones."""
    generator = random.Random(seed)
    kinds = list(KINDS)
    for number in range(count):
        turn, kind = divmod(number, len(kinds))
        sizes = {name: _between(generator, *limits) for name, limits in RANGES.items()}
        yield _rounded(_halved(_restricted(Draw(number, kinds[kind], **sizes), turn), generator))


def _between(generator: random.Random, low: int, high: int) -> int:
    return round(2 ** generator.uniform(math.log2(low), math.log2(high)))


def _restricted(draw: Draw, turn: int) -> Draw:
    if draw.kind in ONE_STEP and turn % 2 == 0:
        return replace(draw, steps=1)
    if draw.kind == "CNN":
        return replace(draw, steps=max(draw.steps, SMALLEST_IMAGE))
    if draw.kind in RECURRENT:
        return replace(draw, steps=min(draw.steps, MOST_UNROLLED // draw.layers))
    return draw


def _halved(draw: Draw, generator: random.Random) -> Draw:
    smallest = {name: RANGES[name][0] for name in ("batch_size", "steps", "width")}
    if draw.kind == "CNN":
        smallest["steps"] = SMALLEST_IMAGE
    while draw.work > LARGEST_WORK:
        name = generator.choice([name for name, low in smallest.items() if getattr(draw, name) >= 2 * low])
        draw = replace(draw, **{name: getattr(draw, name) // 2})
    return draw


def _rounded(draw: Draw) -> Draw:
    steps = math.isqrt(draw.steps) ** 2 if draw.kind == "CNN" else draw.steps
    return replace(draw, steps=steps, width=8 * round(draw.width / 8))


DRAWS = {draw.name: draw for draw in draws()}
# Of the least work, for smoke runs.
QUICK = tuple(sorted(DRAWS, key=lambda name: DRAWS[name].work)[:2])
