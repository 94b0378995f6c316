"""The ordinary gradient of the mean loss of a batch: one backward pass, and the unit of every ratio."""

from __future__ import annotations

import torch

from benchmarks.methods.by_hand import arrays
from benchmarks.methods.method import Method, Prepared
from benchmarks.report.records import UNIT
from benchmarks.workloads import Workload


def prepare(work: Workload, _quantity: str) -> Prepared:
    return _prepared(work, work.batch_loss)


def prepare_compiled(work: Workload, _quantity: str) -> Prepared:
    return _prepared(work, torch.compile(work.batch_loss))


def _prepared(work, batch_loss):
    params = work.trained

    def run():
        loss = batch_loss(work.model, *work.batch)
        return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))

    return Prepared(run, arrays)


METHODS = (
    Method(UNIT, "torch", prepare, shown_for=("mean",)),
    Method(f"{UNIT} compiled", "torch", prepare_compiled, shown_for=("mean",)),
)
