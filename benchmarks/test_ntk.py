"""The empirical neural tangent kernel of a CNN with 10 outputs: ``make bench``. Ratios hold within a group.

The network and its sizes are those of torch's tutorial on neural tangent kernels (functorch), 20 images against 5. Its
two ways are written here in our own words: contracting Jacobians, and products of the kernel with unit vectors.
``peak_mib`` is the largest sum of bytes that torch's allocator held beyond what it held before, in one call.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev, jvp, vjp, vmap

from persample import Factored, Gram, per_sample_grads
from persample.utils.measure import peak_memory

OUTPUTS = 10
# Which pairs of outputs are wanted: all, those of an output with itself, or their sum.
CONTRACTIONS = {"full": "nkp,mlp->nmkl", "diagonal": "nkp,mkp->nmk", "trace": "nkp,mkp->nm"}


def network():
    layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32 * 26 * 26, OUTPUTS))


def build():
    torch.manual_seed(0)
    model = network()
    params = {name: x.detach() for name, x in model.named_parameters()}
    return (
        lambda params, x: functional_call(model, params, (x[None],))[0],
        params,
        *torch.randn(25, 3, 32, 32).split(20),
    )


def contracted(form):
    """Write out the Jacobians of both batches, and contract them parameter by parameter."""

    def jacobians(outputs, params, x):
        return [j.flatten(2) for j in vmap(jacrev(outputs), (None, 0))(params, x).values()]

    def kernel(outputs, params, one, other):
        pairs = zip(jacobians(outputs, params, one), jacobians(outputs, params, other), strict=True)
        return sum(torch.einsum(CONTRACTIONS[form], *pair) for pair in pairs)

    return kernel


def products(outputs, params, one, other):
    """Multiply the kernel of each pair of images with unit vectors: a vjp, and a jvp of its result."""

    def of_pair(x, y):
        _, pull_back = vjp(lambda params: outputs(params, x), params)
        return vmap(lambda unit: jvp(lambda params: outputs(params, y), (params,), pull_back(unit))[1])(
            torch.eye(OUTPUTS)
        )

    return vmap(vmap(of_pair, (None, 0)), (0, None))(one, other)


def ours(engine):
    def kernel(outputs, params, one, other):
        options = {"outputs": "rows", "engine": engine}
        factors = per_sample_grads(outputs, params, other, Factored(), **options)
        return per_sample_grads(outputs, params, one, Gram(factors), **options).transpose(1, 2)

    return kernel


METHODS = {
    "Jacobian contraction, full (unit)": contracted("full"),
    "Jacobian contraction, diagonal": contracted("diagonal"),
    "Jacobian contraction, trace": contracted("trace"),
    "NTK-vector products": products,
    "persample, eager": ours("eager"),
    "persample, compiled": ours("compiled"),
}


@pytest.mark.parametrize("method", METHODS)
def test_ntk(benchmark, method):
    work = build()
    kernel = METHODS[method](*work)
    if kernel.ndim == 4:
        expected = contracted("full")(*work)
        assert (kernel - expected).abs().max() < 1e-4 * expected.abs().max()
    benchmark.group = "NTK of a CNN with 10 outputs, 20 images against 5"
    benchmark.pedantic(METHODS[method], args=work, rounds=7, warmup_rounds=1)
    benchmark.extra_info["peak_mib"] = round(peak_memory(lambda: METHODS[method](*work)) / 2**20, 1)
