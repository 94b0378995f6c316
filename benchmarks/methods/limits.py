"""Limits: writing the stack's memory, and the matrix products of the batch gradient by ``torch.mm``."""

from __future__ import annotations

import torch

from benchmarks.methods.by_hand import arrays
from benchmarks.methods.method import Method, Prepared
from benchmarks.quantities import COMMON
from benchmarks.report.records import FILL, GEMMS
from benchmarks.workloads import Workload


def prepare_fill(work: Workload, _quantity: str) -> Prepared:
    """Write the bytes of the stacked gradients, into memory that is already there."""
    batch_size = len(work.batch[0])
    stack = {name: torch.empty(batch_size, *p.shape, device=p.device) for name, p in work.params.items()}

    def run():
        for rows in stack.values():
            rows.fill_(1.0)
        return stack

    return Prepared(run, arrays)


def prepare_gemms(work: Workload, _quantity: str) -> Prepared:
    """Multiply the matrices of TD(0)'s batch gradient, into memory that is already there.

    Two forward passes (of the second nothing is kept), the signals back to each layer but the first, and the weights'
    gradients: matrices of the right shapes, and nothing between them.
    """
    weights = [p for p in work.params.values() if p.ndim == 2]
    inputs = [torch.randn(len(work.batch[0]), w.shape[1], device=w.device) for w in weights]
    signals = [torch.randn(len(work.batch[0]), w.shape[0], device=w.device) for w in weights]
    forward = [(x, w.T) for x, w in zip(inputs, weights, strict=True)]
    backward = [(signal, w) for signal, w in list(zip(signals, weights, strict=True))[1:]]
    gradients = [(signal.T, x) for signal, x in zip(signals, inputs, strict=True)]
    products = [(a, b, a @ b) for a, b in (*forward, *forward, *backward, *gradients)]

    def run():
        for a, b, out in products:
            torch.mm(a, b, out=out)

    return Prepared(run, arrays)


METHODS = (
    Method(FILL, "torch", prepare_fill, is_limit=True, shown_for=("stack",)),
    Method(
        GEMMS,
        "torch",
        prepare_gemms,
        is_limit=True,
        shown_for=tuple(quantity for quantity in COMMON if quantity != "stack"),
        shown_on="TD(0) MLP",
    ),
)
