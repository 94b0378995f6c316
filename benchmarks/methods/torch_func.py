"""torch.func: vmap(grad(loss)), and the quantity from the stack, as in PyTorch's tutorial; eager and compiled."""

from __future__ import annotations

import warnings

import torch
from torch.func import grad, vmap

from benchmarks.methods.by_hand import arrays, reduce
from benchmarks.methods.method import Method, Prepared
from benchmarks.quantities import QUANTITIES
from benchmarks.workloads import Workload


def prepare(work: Workload, quantity: str) -> Prepared:
    return _prepared(work, _function(work, quantity))


def prepare_compiled(work: Workload, quantity: str) -> Prepared:
    return _prepared(work, torch.compile(_function(work, quantity)))


def _function(work, quantity):
    rows = vmap(grad(work.pure_loss), in_dims=(None, *(0 for _ in work.batch)))
    return lambda params, *batch: reduce(rows(params, *batch), quantity)


def _prepared(work, function):
    params = work.params
    warnings.filterwarnings("ignore", "There is a performance drop")  # where vmap has no batching rule
    return Prepared(lambda: function(params, *work.batch), arrays)


METHODS = (
    Method("torch.func", "torch", prepare, shown_for=QUANTITIES),
    Method("torch.func compiled", "torch", prepare_compiled, shown_for=QUANTITIES),
)
