"""The cost model against the clock: every way to store and contract gradients, over a sweep of sizes.

Run as ``python -m benchmarks.ways [COUNT [FILE.json [cuda]]]``. Times are CPU seconds of one thread, or seconds of the
wall on a GPU, with larger sizes. The regret of a size is the time of the way that the cost model takes, divided by that
of the fastest way within its memory.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from persample.factors import Dense, Factor, Outer
from persample.factors.contractions import squared_norms_of_sums
from persample.factors.cost_model import Plan, Size, inner_products_are_faster

OPERATIONS = {
    "Norm": {"squared_norms"},
    "ClippedMean": {"squared_norms", "weighted_sum"},
    "SecondMoment": {"second_moment"},
    "Variance": {"weighted_sum", "second_moment"},
    "Gram": {"gram"},
    "NaturalGradient": {"gram", "weighted_sum"},
    "Dot": {"dot"},
}
# Seconds below which the overhead of operations decides, and both ways take about as many; on a GPU a third of that.
SHORTEST = 1e-3


class Case(NamedTuple):
    """The sizes of one layer: B samples of T terms, o rows and i columns."""

    samples: int
    terms: int
    rows: int
    columns: int

    def size(self, device: str = "cpu") -> Size:
        """The size as the cost model takes it."""
        samples, terms, rows, columns = self
        return Size(terms, samples * rows * columns, samples * terms * (rows + columns), device)


class _Blocks(Outer):
    def squared_norms(self) -> Tensor:
        return Factor.squared_norms(self)


class _InnerProducts(Outer):
    def squared_norms(self) -> Tensor:
        return squared_norms_of_sums([(self.left, self.right)])[0]


def cases(count: int, device: str = "cpu") -> Iterator[Case]:
    """Draw sizes that take at most 2 GiB and a few seconds; on a GPU 16 GiB."""
    draw = random.Random(0)
    most = [2**24, 2**27, 2**32] if device == "cpu" else [2**28, 2**30, 2**39]

    def pick(low: int, high: int) -> int:
        return round(2 ** draw.uniform(math.log2(low), math.log2(high)))

    while count:
        case = Case(pick(1, 512), pick(1, 1024), pick(8, 4096), pick(8, 4096))
        size = case.size()
        if all(x < y for x, y in zip((size.stored, size.written, case.terms * size.written), most, strict=True)):
            count -= 1
            yield case


def ways(case: Case, ops: set[str], device: str = "cpu") -> dict[str, Callable[[], object]]:
    """Return what computes the operations in each way."""
    samples, terms, rows, columns = case
    left, right = (torch.randn(samples, 1, terms, width, device=device) for width in (rows, columns))
    weights = torch.rand(samples, dtype=torch.float64, device=device)
    direction = torch.randn(1, rows, columns, device=device)

    def contract(factor: Factor) -> None:
        if "squared_norms" in ops:
            factor.squared_norms()
        if "gram" in ops:
            factor.gram()
        if "dot" in ops:
            factor.dot(direction)
        dtype = torch.float64 if "second_moment" in ops else torch.float32
        center = factor.weighted_sum(weights.to(dtype), dtype) if "weighted_sum" in ops else None
        if "second_moment" in ops:
            factor.second_moment(weights, dtype, center)

    def way(kind: type[Outer]) -> Outer:
        return kind(left, right, (rows, columns), left.dtype)

    found = {
        "written out": lambda: contract(Dense(way(Outer).materialize())),
        "blocks": lambda: contract(way(_Blocks)),
    }
    if "squared_norms" in ops and terms > 1 and samples * terms**2 < (2**25 if device == "cpu" else 2**29):
        found["inner products"] = lambda: contract(way(_InnerProducts))
    return found


def seconds(function: Callable[[], object], device: str = "cpu") -> float:
    """Return the median time of some calls."""
    clock = time.process_time if device == "cpu" else _after_the_gpu
    function()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 0.1 and len(times) < 15):
        start = clock()
        function()
        times.append(clock() - start)
    return statistics.median(times)


def _after_the_gpu() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def taken(case: Case, ops: set[str], device: str = "cpu") -> str:
    """Return the way that the library takes."""
    if Plan(frozenset(ops)).reason_to_write_out(case.size(device)):
        return "written out"
    by_terms = "squared_norms" in ops and case.terms > 1 and inner_products_are_faster(case.size(device))
    return "inner products" if by_terms else "blocks"


def regret(row: dict) -> float:
    """Return the time of the way taken in units of the fastest within the memory."""
    times = dict(row["seconds"])
    if not row["fits"]:
        times.pop("written out")
    return times.get(row["taken"], math.inf) / min(times.values())


def measure(count: int, device: str = "cpu") -> list[dict]:
    """Return one row per size and reduction."""
    rows = []
    for case in cases(count, device):
        fits = case.size().written <= Plan(frozenset()).allowance * case.size().stored
        for name, ops in OPERATIONS.items():
            times = {way: seconds(function, device) for way, function in ways(case, ops, device).items()}
            sizes = {**case._asdict(), "reduction": name, "fits": fits}
            rows.append({**sizes, "seconds": times, "taken": taken(case, ops, device)})
    return rows


def table(rows: list[dict], shortest: float) -> str:
    """Return the regret of each reduction as a table in Markdown."""
    lines = ["| reduction | sizes | median | 95 % | worst | within 1.15 |", "| --- | --- | --- | --- | --- | --- |"]
    long = [row for row in rows if min(row["seconds"].values()) >= shortest]
    for name in [*OPERATIONS, "all"]:
        found = sorted(regret(row) for row in long if name in {row["reduction"], "all"})
        share = sum(x <= 1.15 for x in found) / len(found)
        high = found[int(0.95 * len(found))]
        middle = statistics.median(found)
        lines.append(f"| {name} | {len(found)} | {middle:.2f} | {high:.2f} | {found[-1]:.2f} | {share:.0%} |")
    return "\n".join(lines)


def main(count: int = 100, file: str | None = None, device: str = "cpu") -> None:
    """Measure, print the table, and write the rows to a file."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = measure(count, device)
    if file:
        Path(file).write_text(json.dumps(rows), encoding="utf-8")
    sys.stdout.write(table(rows, SHORTEST if device == "cpu" else SHORTEST / 3) + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:4])
