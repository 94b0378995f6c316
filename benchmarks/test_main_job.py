"""The averaged and the clipped update of TD(0) and REINFORCE: us, vmap(grad) by hand, the loop, the batch gradient.

Every ratio is against the ordinary batch gradient of the same group and run: ``make bench``.
"""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, grad, vmap

from persample import ClippedMean, Mean, Norm, naive, per_sample_grads
from persample.losses import reinforce_loss, td_loss


def td_mlp(batch_size):
    model = _mlp(8, 256, 256, 1)

    def loss(params, s_tm1, r_t, s_t):
        v_tm1, v_t = (functional_call(model, params, s).squeeze(-1) for s in (s_tm1, s_t))
        return td_loss(v_tm1, r_t, 0.99, v_t)

    batch = (torch.randn(batch_size, 8), torch.randn(batch_size), torch.randn(batch_size, 8))
    return loss, dict(model.named_parameters()), batch


def reinforce_mlp(episodes, steps):
    model = _mlp(8, 64, 64, 4)

    def loss(params, obs_t, a_t, return_t):
        return reinforce_loss(functional_call(model, params, obs_t), a_t, return_t)

    batch = (torch.randn(episodes, steps, 8), torch.randint(4, (episodes, steps)), torch.randn(episodes, steps))
    return loss, dict(model.named_parameters()), batch


def _mlp(inputs, *sizes):
    layers = []
    for size in sizes:
        layers += [torch.nn.Linear(inputs, size), torch.nn.Tanh()]
        inputs = size
    return torch.nn.Sequential(*layers[:-1])


def batch_gradient(loss, params, batch):
    """One ordinary backward pass of the mean loss: these losses take a whole batch as they are."""
    mean = loss(params, *batch).sum() / len(batch[0])
    return torch.autograd.grad(mean, list(params.values()))


def loop_mean(loss, params, batch):
    total = None
    for _, grads in naive.loop(loss, params, batch):
        total = grads if total is None else {name: total[name] + grads[name] for name in grads}
    return {name: value / len(batch[0]) for name, value in total.items()}


def vmap_clipped(loss, params, batch):
    """What a user would write with torch.func."""
    rows = vmap(grad(loss), in_dims=(None, *(0 for _ in batch)))({k: p.detach() for k, p in params.items()}, *batch)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in rows.values()]).norm(dim=0)
    scale = (1 / norms).clamp(max=1) / len(norms)
    return {name: torch.tensordot(scale, g, 1) for name, g in rows.items()}


WORKLOADS = {
    "TD(0) MLP 256 B=256": (td_mlp, (256,)),
    "TD(0) MLP 256 B=1024": (td_mlp, (1024,)),
    "REINFORCE MLP 64 32x200": (reinforce_mlp, (32, 200)),
}
METHODS = {
    "batch gradient (unit)": batch_gradient,
    "naive loop, mean": loop_mean,
    "vmap(grad) by hand, clipped mean": vmap_clipped,
    "persample Mean": lambda *args: per_sample_grads(*args, Mean()),
    "persample ClippedMean": lambda *args: per_sample_grads(*args, ClippedMean(1.0)),
    "persample ClippedMean chunk 64": lambda *args: per_sample_grads(*args, ClippedMean(1.0), chunk_size=64),
    "persample Norm": lambda *args: per_sample_grads(*args, Norm()),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_main_job(benchmark, workload, method):
    torch.manual_seed(0)
    make, sizes = WORKLOADS[workload]
    arguments = make(*sizes)
    benchmark.group = workload
    rounds = 2 if method.startswith("naive") else 15
    benchmark.pedantic(METHODS[method], args=arguments, rounds=rounds, warmup_rounds=1)
