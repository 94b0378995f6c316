"""Reductions of per-sample gradients against one ordinary batch gradient of the same model: ``make bench``.

Every ratio is within one group and one run. ``peak_mib`` is the largest sum of bytes that torch's allocator held beyond
what it held before, in one call.
"""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, grad, vmap
from workloads import WORKLOADS, build

from persample import ClippedMean, Gram, Mean, Norm, naive, per_sample_grads
from persample.cli.measure import peak_memory


def batch_gradient(work):
    """One ordinary backward pass: the unit."""
    return torch.autograd.grad(work.batch_loss(work.model, *work.batch), list(work.model.parameters()))


def loop_mean(work):
    total = None
    for _, grads in naive.loop(work.loss_fn, work.model, work.batch):
        total = grads if total is None else {name: total[name] + grads[name] for name in grads}
    return {name: value / len(work.batch[0]) for name, value in total.items()}


def vmap_clipped(work):
    """What a user would write with torch.func."""
    params = {name: param.detach() for name, param in work.model.named_parameters()}

    def loss(params, *sample):
        return functional_call(_Called(work), {f"model.{name}": p for name, p in params.items()}, sample)

    rows = vmap(grad(loss), in_dims=(None, *(0 for _ in work.batch)))(params, *work.batch)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in rows.values()]).norm(dim=0)
    scale = (1 / norms).clamp(max=1) / len(norms)
    return {name: torch.tensordot(scale, g, 1) for name, g in rows.items()}


class _Called(torch.nn.Module):
    def __init__(self, work):
        super().__init__()
        self.model, self.loss_fn = work.model, work.loss_fn

    def forward(self, *sample):
        return self.loss_fn(self.model, *sample)


def ours(reduction, **options):
    return lambda work: per_sample_grads(work.loss_fn, work.model, work.batch, reduction, **options)


METHODS = {
    "batch gradient (unit)": batch_gradient,
    "naive loop, mean": loop_mean,
    "vmap(grad) by hand, clipped mean": vmap_clipped,
    "persample Mean": ours(Mean()),
    "persample ClippedMean": ours(ClippedMean(1.0)),
    "persample ClippedMean, compiled": ours(ClippedMean(1.0), engine="compiled"),
    "persample ClippedMean in 4 chunks": lambda work: ours(ClippedMean(1.0), chunk_size=-(-len(work.batch[0]) // 4))(
        work
    ),
    "persample Norm": ours(Norm()),
    "persample Gram": ours(Gram()),
    "persample Mean, ClippedMean and Norm": ours((Mean(), ClippedMean(1.0), Norm())),
}
# What torch cannot do (recurrent layers under vmap), or what would take minutes or 4 GB.
LEFT_OUT = {
    "vmap(grad) by hand, clipped mean": {"REINFORCE GRU 64, 32x50", "MLP 5120-2560-1280, B=32"},
    "naive loop, mean": {"TD(0) MLP 256, B=1024", "transformer, vocabulary 32000, B=16", "MLP 5120-2560-1280, B=32"},
    "persample Gram": {"transformer, vocabulary 32000, B=16"},
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # what vmap by hand meets
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_reductions(benchmark, workload, method):
    if workload in LEFT_OUT.get(method, ()):
        pytest.skip("see LEFT_OUT")
    work = build(workload)
    benchmark.group = workload
    call = METHODS[method]
    rounds = 2 if method.startswith("naive") else 30 if workload.startswith(("TD", "REINFORCE")) else 7
    benchmark.pedantic(call, args=(work,), rounds=rounds, warmup_rounds=2)
    benchmark.extra_info["peak_mib"] = round(peak_memory(lambda: call(work)) / 2**20, 1)
