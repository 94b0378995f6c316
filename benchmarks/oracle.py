"""The reference of all checks: the plain loop over samples in float64.

``python -m benchmarks.oracle WORKLOAD FOLDER QUANTITY …`` writes the workload (``workload.npz``) and the reference of
each quantity (``QUANTITY.npz``) to a folder that the workers of all environments read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.methods.by_hand import arrays
from benchmarks.methods.method import CORRECTION, DAMPING, MAX_NORM
from benchmarks.quantities import Arrays, checked_rows
from benchmarks.saved import save_truth
from benchmarks.workloads import Workload, build


def oracle(work: Workload, quantity: str) -> Arrays:
    """Compute a quantity sample by sample, in the precision of the workload (``work.to(torch.float64)``)."""
    return arrays(reference(work, quantity))


def reference(work: Workload, quantity: str) -> Tensor | dict[str, Tensor]:
    """Compute the same as float64 tensors on the device of the workload."""
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
            return {name: g.var(0, correction=CORRECTION) for name, g in _stack(work, range(batch_size)).items()}
        case _:
            return _weighted_sum(work, _weights(work, quantity, batch_size))


def _weights(work, quantity, batch_size):
    if quantity == "natural_gradient":
        system = _gram(work) / batch_size
        system += DAMPING * torch.eye(batch_size).to(system)
        return torch.linalg.solve(system, system.new_ones(batch_size)) / batch_size
    if quantity == "clipped_mean":
        return (MAX_NORM / _norms(work)).clamp(max=1) / batch_size  # a norm of 0 gives ∞, clamped to 1
    return [1 / batch_size] * batch_size


def _gram(work):
    rows = torch.cat([g.flatten(1) for g in _stack(work, range(len(work.batch[0]))).values()], 1)
    return rows @ rows.T


def _grads(work: Workload, samples) -> Iterator[dict[str, Tensor]]:
    params = work.trained
    for i in samples:
        loss = work.loss_fn(work.model, *(x[i] for x in work.batch))
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
        yield {name: grad.double() for name, grad in zip(params, grads, strict=True)}


def _stack(work, samples):
    rows = list(_grads(work, samples))
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _norms(work):
    lengths = [[g.norm() for g in grads.values()] for grads in _grads(work, range(len(work.batch[0])))]
    return torch.stack([torch.stack(one).norm() for one in lengths])


def _weighted_sum(work, weights):
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in work.params.items()}
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
