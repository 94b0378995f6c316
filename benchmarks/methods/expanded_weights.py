"""PyTorch's ExpandedWeights (``torch.nn.utils._per_sample_grad``): weights that record one gradient per sample."""

from __future__ import annotations

from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

from benchmarks.methods.by_hand import arrays, reduce
from benchmarks.methods.method import Method, Prepared
from benchmarks.workloads import Workload


def prepare(work: Workload, quantity: str) -> Prepared:
    params = work.trained

    def model(*args):
        # "mean": the loss is averaged over the batch, and its gradients are to be those of each sample's own loss.
        return call_for_per_sample_grads(work.model, loss_reduction="mean")(*args)

    def run():
        work.batch_loss(model, *work.batch).backward()
        rows = {name: p.grad_sample for name, p in params.items()}
        for p in params.values():
            p.grad_sample = None
        return reduce(rows, quantity)

    return Prepared(run, arrays)


METHODS = (Method("ExpandedWeights", "torch", prepare),)
