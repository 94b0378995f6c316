"""TorchJD's Gramian engine: the Gram matrix of all losses, and what follows from it.

Its documented use is: compute the Gramian, take weights from it, back-propagate the losses so weighted.
"""

from __future__ import annotations

import copy

import torch
from torchjd.autogram import Engine

from benchmarks.methods.by_hand import arrays
from benchmarks.methods.layers import losses
from benchmarks.methods.method import MAX_NORM, CannotError, Method, Prepared
from benchmarks.workloads import Workload


def prepare(work: Workload, quantity: str) -> Prepared:
    if quantity in {"stack", "variance"}:
        raise CannotError("Engine.compute_gramian returns the Gramian of the Jacobian, never the Jacobian itself")
    model, batch_losses = copy.deepcopy(work.model), losses(work)
    engine = _engine(model)
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def run():
        for p in params.values():
            p.grad = None
        loss = batch_losses(model, *work.batch)
        if quantity == "mean":
            return weighted(loss, torch.full_like(loss, 1 / len(loss)))
        gramian = engine.compute_gramian(loss)
        if quantity == "gram":
            return gramian
        norms = gramian.diagonal().sqrt()
        if quantity == "norms":
            return norms
        return weighted(loss, (MAX_NORM / norms).clamp(max=1.0) / len(loss))

    def weighted(loss, weights):
        loss.backward(weights)
        return {name: p.grad for name, p in params.items()}

    return Prepared(run, arrays)


def _engine(model):
    """An engine over the batch axis; without it where the library refuses a layer and says to leave it out."""
    try:
        return Engine(model, batch_dim=0)
    except ValueError as error:
        if "batch_dim=None" not in str(error):
            raise
        return Engine(model, batch_dim=None)


METHODS = (Method("TorchJD Gramian", "torch-peers", prepare),)
