"""Derivatives of the caller's around a call: right under vmap, refused where results would be constants."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_trees_close
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from persample import (
    ArgumentError,
    ClippedMean,
    Gram,
    Loss,
    LossError,
    Mean,
    NoiseScale,
    Norm,
    Stack,
    Sum,
    Variance,
    composite_grads,
    explain,
    per_sample_grads,
)

ENGINES = ["eager", "compiled", "loop"]
REDUCTIONS = {"Sum": Sum(), "Mean": Mean(), "Norm": Norm(), "Loss": Loss(), "ClippedMean": ClippedMean(1.0)}


def f(w, x):
    return (w @ x).tanh()


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in [(3,), (4, 3)]]


DERIVATIVES = {
    "grad": (lambda g, x: grad(lambda x: g(x).sum())(x), "grad"),
    "vjp": (lambda g, x: vjp(g, x)[1](g(x)), "grad"),
    "jvp": (lambda g, x: jvp(g, (x,), (torch.ones_like(x),)), "jvp"),
    "jacrev": (lambda g, x: jacrev(g)(x), "grad"),
    "jacfwd": (lambda g, x: jacfwd(g)(x), "jvp"),
    "hessian": (lambda g, x: hessian(lambda x: g(x).sum())(x), "jvp"),
    "vmap of grad": (lambda g, x: vmap(grad(lambda x: g(x).sum()))(torch.stack([x, x])), "grad"),
}
PLACES = {
    "params": lambda reduce, engine, w, xs: lambda w: per_sample_grads(f, w, xs, reduce, engine=engine),
    "batch": lambda reduce, engine, w, xs: lambda xs: per_sample_grads(f, w, xs.expand(4, 3), reduce, engine=engine),
    "weights": lambda reduce, engine, w, xs: (
        lambda weights: per_sample_grads(f, w, xs[:3], reduce, weights=weights, engine=engine)
    ),
    "closed over": lambda reduce, engine, w, xs: (
        lambda c: per_sample_grads(lambda w, x: f(w * c, x), w, xs, reduce, engine=engine)
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives_around_a_call_are_refused(derivative, place, reduce, engine, data):
    around, name = DERIVATIVES[derivative]
    call = PLACES[place](REDUCTIONS[reduce], engine, *data)
    match = (
        rf"per_sample_grads: expected .* nobody differentiates .* inside torch.func.{name}\. .*vmap\(torch.func.grad"
    )
    with pytest.raises(ArgumentError, match=match):
        around(call, data[0])


@pytest.mark.parametrize("engine", ENGINES)
def test_forward_mode_of_autograd_is_refused(engine, data):
    w, xs = data
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(w, torch.ones_like(w))
        with pytest.raises(ArgumentError, match=r"inside a level of torch.autograd.forward_ad\."):
            per_sample_grads(f, dual, xs, Sum(), engine=engine)
        with pytest.raises(ArgumentError, match="forward_ad"):
            per_sample_grads(lambda w, x: f(w * dual, x), w, xs, Sum(), engine=engine)


INSIDE = {
    "a sum of two losses": lambda w, x, xs, engine: f(w, x) + per_sample_grads(f, w, xs, Norm(), engine=engine).sum(),
    "MAML": lambda w, x, xs, engine: f(w - 0.1 * per_sample_grads(f, w, xs, Mean(), engine=engine), x),
}


@pytest.mark.parametrize("inner", ENGINES)
@pytest.mark.parametrize("outer", ENGINES)
@pytest.mark.parametrize("loss", INSIDE)
def test_calls_inside_a_loss_are_refused(loss, outer, inner, data):
    w, xs = data
    with pytest.raises(ArgumentError, match=r"inside loss_fn, which is differentiated.*torch.no_grad"):
        per_sample_grads(lambda w, x: INSIDE[loss](w, x, xs, inner), w, xs, engine=outer)
    per_sample_grads(f, w, xs, engine=outer)  # and the refusal leaves nothing behind


def test_calls_inside_a_loss_of_linear_layers_are_refused(data):
    _, xs = data
    model = torch.nn.Linear(3, 1).double()

    def loss(model, x):
        return model(x).sum() + per_sample_grads(f, model.weight[0], xs, Norm()).sum()

    with pytest.raises(ArgumentError, match="inside loss_fn"):
        per_sample_grads(loss, model, xs, Norm())


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_a_call_inside_an_encoder_or_a_composite_loss_is_refused(engine, data):
    w, xs = data

    def encode(w, x):
        return w * x + per_sample_grads(f, w, xs, Mean())

    def loss(z):
        return z.sum() + per_sample_grads(f, z[0], xs, Norm()).sum()

    with pytest.raises(ArgumentError, match="inside encode_fn"):
        composite_grads(encode, torch.sum, w, xs, engine=engine)
    with pytest.raises(ArgumentError, match="inside loss_fn"):
        composite_grads(lambda w, x: w * x, loss, w, xs, engine=engine)


@pytest.mark.parametrize("called", ["composite_grads", "explain"])
def test_the_other_functions_are_refused_too(called, data):
    w, xs = data
    calls = {
        "composite_grads": lambda w: composite_grads(lambda w, x: w * x, torch.sum, w, xs)[1],
        "explain": lambda w: explain(f, w, xs) and w,
    }
    with pytest.raises(ArgumentError, match=f"{called}: expected .* inside torch.func.grad"):
        grad(lambda w: calls[called](w).sum())(w)


@pytest.mark.parametrize("engine", ENGINES)
def test_constants_that_are_meant_are_right(engine, data):
    w, xs = data
    norms = per_sample_grads(f, w, xs, Norm(), engine="loop")

    def scaled(w, x):
        with torch.no_grad():
            scale = per_sample_grads(f, w, xs, Norm()).sum()
        return scale * f(w, x)

    def outer(w):
        with torch.no_grad():
            scale = per_sample_grads(f, w, xs, Norm()).sum()
        return scale * f(w, xs[0])

    rows = per_sample_grads(f, w, xs, engine="loop")
    if engine == "compiled":
        with pytest.raises(LossError, match=r"(?s)cannot be compiled: .*engine='eager'"):
            per_sample_grads(scaled, w, xs, engine=engine)
    else:
        assert_trees_close(per_sample_grads(scaled, w, xs, engine=engine), norms.sum() * rows, rtol=1e-9)
    assert_trees_close(grad(outer)(w), norms.sum() * rows[0], rtol=1e-9)


ENSEMBLE = {**REDUCTIONS, "Stack": Stack(), "Gram": Gram(), "Variance": Variance(), "NoiseScale": NoiseScale()}


@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.parametrize("reduce", ENSEMBLE)
def test_vmap_around_a_call_is_an_ensemble(reduce, engine, data):
    _, xs = data
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    generator = torch.Generator().manual_seed(1)
    ensemble = {
        name: torch.randn(5, *p.shape, dtype=p.dtype, generator=generator) for name, p in model.named_parameters()
    }

    def loss(params, x):
        return functional_call(model, params, x).square().sum()

    def one(params, engine=engine):
        return per_sample_grads(loss, params, xs, ENSEMBLE[reduce], engine=engine)

    found = vmap(one)(ensemble)
    members = [one({name: x[i] for name, x in ensemble.items()}, "loop") for i in range(5)]
    expected = torch.utils._pytree.tree_map(lambda *rows: torch.stack(rows), *members)
    assert_trees_close(found, expected, rtol=1e-9)


def test_vmap_over_batches_and_closed_over_hyperparameters(data):
    w, xs = data
    scales = torch.tensor([0.5, 2.0], dtype=torch.float64)
    found = vmap(lambda scale: per_sample_grads(lambda w, x: f(w, scale * x), w, xs, ClippedMean(0.1)))(scales)
    each = [per_sample_grads(f, w, scale * xs, ClippedMean(0.1), engine="loop") for scale in scales]
    assert_trees_close(found, torch.stack(each), rtol=1e-9)
    found = vmap(lambda xs: per_sample_grads(f, w, xs, Norm()))(torch.stack([xs, 2 * xs]))
    each = [per_sample_grads(f, w, x, Norm(), engine="loop") for x in (xs, 2 * xs)]
    assert_trees_close(found, torch.stack(each), rtol=1e-9)


def test_vmap_around_the_loop_engine_says_what_to_use(data):
    w, xs = data
    with pytest.raises(ArgumentError, match=r"engine: expected .*vmap.*received 'loop'.*engine='eager'"):
        vmap(lambda w: per_sample_grads(f, w, xs, Sum(), engine="loop"))(torch.stack([w, w]))
