"""The reference of all checks: the plain loop over samples in float64.

``python -m benchmarks.oracle WORKLOAD FOLDER QUANTITY …`` writes the workload (``workload.npz``) and the reference of
each quantity (``QUANTITY.npz``) to a folder that the workers of all environments read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.methods.method import CORRECTION, DAMPING, MAX_NORM
from benchmarks.quantities import Arrays, checked_rows
from benchmarks.saved import save_truth
from benchmarks.workloads import Workload, build


def oracle(work: Workload, quantity: str) -> Arrays:
    """Compute a quantity sample by sample, in the precision of the workload (``work.to(torch.float64)``)."""
    batch_size = len(work.batch[0])
    match quantity:
        case "stack":
            rows = checked_rows(batch_size, sum(p.numel() for p in work.params.values()))
            return _stack(work, rows)
        case "norms":
            return _norms(work)
        case "gram":
            return _gram(work)
        case "variance":
            return {name: g.var(0, ddof=CORRECTION) for name, g in _stack(work, range(batch_size)).items()}
        case _:
            return _weighted_sum(work, _weights(work, quantity, batch_size))


def _weights(work, quantity, batch_size):
    if quantity == "natural_gradient":
        system = _gram(work) / batch_size + DAMPING * np.eye(batch_size)
        return np.linalg.solve(system, np.ones(batch_size)) / batch_size
    if quantity == "clipped_mean":
        with np.errstate(divide="ignore"):
            return np.minimum(1, MAX_NORM / _norms(work)) / batch_size
    return np.full(batch_size, 1 / batch_size)


def _gram(work):
    batch_size = len(work.batch[0])
    rows = np.concatenate([g.reshape(batch_size, -1) for g in _stack(work, range(batch_size)).values()], 1)
    return rows @ rows.T


def _grads(work: Workload, samples) -> Iterator[dict[str, np.ndarray]]:
    params = work.trained
    for i in samples:
        loss = work.loss_fn(work.model, *(x[i] for x in work.batch))
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
        yield {name: grad.numpy() for name, grad in zip(params, grads, strict=True)}


def _stack(work, samples):
    rows = list(_grads(work, samples))
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _norms(work):
    squares = [sum(np.vdot(g, g) for g in grads.values()) for grads in _grads(work, range(len(work.batch[0])))]
    return np.sqrt(squares)


def _weighted_sum(work, weights):
    total = {name: np.zeros(p.shape) for name, p in work.params.items()}
    for weight, grads in zip(weights, _grads(work, range(len(weights))), strict=True):
        for name, grad in grads.items():
            total[name] += weight * grad
    return total


def write(name: str, folder: Path, quantities: list[str]) -> None:
    """Write the workload and the references of its quantities."""
    build(name).save(folder / "workload.npz")
    work = build(name).to(torch.float64)
    for quantity in quantities:
        save_truth(oracle(work, quantity), folder / f"{quantity}.npz")


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
