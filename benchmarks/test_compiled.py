"""The compiled engine at its limits: the cost of a call, memory written at the speed of ``fill_``, other frameworks.

Every ratio is within one group and one run. JAX is timed where it is installed (``pip install jax``).
"""

from __future__ import annotations

import pytest
import torch
from workloads import build

from persample import per_sample_grads, stop_gradient


def td_loss(theta, s_tm1, r_t, s_t):
    """The tutorial's loss: 3 parameters."""
    return (r_t + stop_gradient(s_t @ theta) - s_tm1 @ theta) ** 2


def ours(theta, batch, **options):
    return lambda: per_sample_grads(td_loss, theta, batch, **options)


def by_hand(theta, batch, **_):
    return lambda: torch.func.vmap(torch.func.grad(td_loss), in_dims=(None, 0, 0, 0))(theta, *batch)


def with_torch_compile(theta, batch):
    compiled = torch.compile(torch.func.vmap(torch.func.grad(td_loss), in_dims=(None, 0, 0, 0)))
    return lambda: compiled(theta, *batch)


def with_jax(theta, batch):
    jax = pytest.importorskip("jax")

    def loss(theta, s_tm1, r_t, s_t):
        return (r_t + jax.lax.stop_gradient(s_t @ theta) - s_tm1 @ theta) ** 2

    compiled = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0, 0, 0)))
    theta, *batch = (jax.numpy.asarray(x.numpy()) for x in (theta, *batch))
    return lambda: compiled(theta, *batch).block_until_ready()


METHODS = {
    "JAX jit (unit)": with_jax,
    "torch.func by hand": by_hand,
    "torch.compile by hand": with_torch_compile,
    "persample eager": ours,
    "persample compiled": lambda theta, batch: ours(theta, batch, engine="compiled"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [2, 4096, 65536])
def test_tutorial(benchmark, size, method):
    torch.manual_seed(0)
    batch = torch.randn(size, 3), torch.randn(size), torch.randn(size, 3)
    call = METHODS[method](torch.randn(3), batch)
    benchmark.group = f"tutorial's TD(0), B={size}"
    benchmark.pedantic(call, rounds=200, iterations=10, warmup_rounds=3)


@pytest.mark.parametrize("method", ["fill_ (unit)", "eager", "eager, out=", "compiled", "compiled, out="])
def test_materializing(benchmark, method):
    work = build("TD(0) MLP 256, B=256")
    engine, *reuses = method.split(", ")
    benchmark.group = "Stack, TD(0) MLP 256, B=256"
    out = {name: torch.empty(256, *param.shape) for name, param in work.model.named_parameters()}

    def call():
        if engine == "fill_ (unit)":
            return [x.fill_(1.0) for x in out.values()]
        options = {"engine": engine, "out": out if reuses else None}
        return per_sample_grads(work.loss_fn, work.model, work.batch, **options)

    benchmark.pedantic(call, rounds=30, warmup_rounds=3)
