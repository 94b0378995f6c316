"""The naive loop: one forward and one backward pass per sample, keeping no more than the quantity needs."""

from __future__ import annotations

import torch

from benchmarks.methods import by_hand
from benchmarks.methods.method import MAX_NORM, Method, Prepared
from benchmarks.workloads import Workload


def prepare(work: Workload, quantity: str) -> Prepared:
    params = work.trained
    batch_size = len(work.batch[0])

    def grads():
        for sample in zip(*work.batch, strict=True):
            loss = work.loss_fn(work.model, *sample)
            yield torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)

    def averaged(scale):
        totals = [torch.zeros_like(p) for p in params.values()]
        for row in grads():
            factor = scale(row) / batch_size
            for total, grad in zip(totals, row, strict=True):
                total.add_(grad * factor)
        return dict(zip(params, totals, strict=True))

    def stacked():
        rows = zip(*grads(), strict=True)
        return by_hand.reduce({name: torch.stack(row) for name, row in zip(params, rows, strict=True)}, quantity)

    runs = {
        "mean": lambda: averaged(lambda _: 1.0),
        "clipped_mean": lambda: averaged(lambda row: (MAX_NORM / _norm(row)).clamp(max=1)),
        "norms": lambda: torch.stack([_norm(row) for row in grads()]),
    }
    return Prepared(runs.get(quantity, stacked), by_hand.arrays)


def _norm(row):
    return torch.stack([g.norm() for g in row]).norm()


METHODS = (Method("naive loop", "torch", prepare),)
