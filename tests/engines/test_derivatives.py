"""Derivatives of the caller's around a call: nested calls, constants that are meant, ensembles, refusals."""

from __future__ import annotations

import functools

import pytest
import torch
from oracle import assert_trees_close
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap

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

ENGINES = ["eager", "traced", "loop"]
REDUCTIONS = {"Sum": Sum(), "Mean": Mean(), "Norm": Norm(), "Loss": Loss(), "ClippedMean": ClippedMean(1.0)}


def f(w, x):
    return (w @ x).tanh()


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in [(3,), (4, 3)]]


@pytest.mark.parametrize("engine", ENGINES)
def test_forward_mode_of_autograd_is_refused(engine, data):
    w, xs = data
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(w, torch.ones_like(w))
        with pytest.raises(ArgumentError, match=r"inside a level of torch.autograd.forward_ad\. Use torch.func.jvp"):
            per_sample_grads(f, dual, xs, Sum(), engine=engine)
        with pytest.raises(ArgumentError, match="forward_ad"):
            per_sample_grads(lambda w, x: f(w * dual, x), w, xs, Sum(), engine=engine)


INSIDE = {
    "a sum of two losses": lambda w, x, xs, **options: f(w, x) + per_sample_grads(f, w, xs, Norm(), **options).sum(),
    "MAML": lambda w, x, xs, **options: f(w - 0.1 * per_sample_grads(f, w, xs, Mean(), **options), x),
}


def nested(loss, outer, xs, w, **options):
    return per_sample_grads(lambda w, x: INSIDE[loss](w, x, xs, **options), w, xs, engine=outer)


@pytest.mark.parametrize("inner", ["eager", "compiled", "auto"])
@pytest.mark.parametrize("outer", ["eager", "auto", "loop"])
@pytest.mark.parametrize("loss", INSIDE)
def test_calls_inside_a_loss_compose(loss, outer, inner, data):
    w, xs = data
    plain = {
        "a sum of two losses": lambda w, x: f(w, x) + vmap(grad(f), (None, 0))(w, xs).norm(dim=1).sum(),
        "MAML": lambda w, x: f(w - 0.1 * vmap(grad(f), (None, 0))(w, xs).mean(0), x),
    }
    found = nested(loss, outer, xs, w, engine=inner, differentiable=outer == "loop")
    assert_trees_close(found, vmap(grad(plain[loss]), (None, 0))(w, xs), rtol=1e-9)


@pytest.mark.parametrize("loss", INSIDE)
def test_inside_the_loop_engine_calls_say_that_they_are_differentiable(loss, data):
    w, xs = data
    with pytest.raises(ArgumentError, match=r"expected differentiable=True inside loss_fn.*torch.no_grad"):
        nested(loss, "loop", xs, w)
    per_sample_grads(f, w, xs, engine="loop")  # and the refusal leaves nothing behind
    found = nested(loss, "loop", xs, w, engine="loop", differentiable=True)
    assert_trees_close(found, nested(loss, "eager", xs, w), rtol=1e-9)


def test_calls_that_transforms_do_not_take_are_refused(data):
    w, xs = data
    with pytest.raises(ArgumentError, match=r"engine: expected .*vmap.*received 'loop'.*engine='eager'"):
        nested("MAML", "eager", xs, w, engine="loop")
    with pytest.raises(LossError, match=r"(?s)cannot be compiled: .*engine='eager'"):
        nested("MAML", "compiled", xs, w)


@pytest.mark.parametrize("differentiable", [False, True])
def test_calls_inside_a_loss_of_linear_layers_compose(differentiable, data):
    _, xs = data
    model = torch.nn.Linear(3, 1).double()

    def loss(model, x, differentiable=True):
        inner = per_sample_grads(f, model.weight[0], xs, Norm(), differentiable=differentiable)
        return model(x).sum() + inner.sum()

    found = per_sample_grads(functools.partial(loss, differentiable=differentiable), model, xs)
    assert_trees_close(found, per_sample_grads(loss, model, xs, engine="loop"), rtol=1e-9)


def test_a_call_inside_an_encoder_or_a_composite_loss(data):
    w, xs = data

    def encode(w, x, **options):
        return w * x + per_sample_grads(f, w, xs, Mean(), **options)

    def loss(z):
        return z.sum() + per_sample_grads(f, z[0], xs, Norm()).sum()

    with pytest.raises(ArgumentError, match="differentiable=True inside encode_fn"):
        composite_grads(encode, torch.sum, w, xs, engine="loop")
    with pytest.raises(ArgumentError, match="differentiable=True inside loss_fn"):
        composite_grads(lambda w, x: w * x, loss, w, xs)
    found = composite_grads(encode, torch.sum, w, xs)[1]
    recorded = composite_grads(functools.partial(encode, differentiable=True), torch.sum, w, xs, engine="loop")[1]
    expected = grad(lambda w: (w * xs + vmap(grad(f), (None, 0))(w, xs).mean(0)).sum())(w)
    assert_trees_close(found, expected, rtol=1e-9)
    assert_trees_close(recorded, expected, rtol=1e-9)


@pytest.mark.parametrize("transform", ["grad", "vmap"])
@pytest.mark.parametrize("called", ["composite_grads", "explain"])
def test_the_other_functions_say_what_to_use(called, transform, data):
    w, xs = data
    calls = {
        "composite_grads": lambda w: composite_grads(lambda w, x: w * x, torch.sum, w, xs)[1],
        "explain": lambda w: explain(f, w, xs) and w,
    }
    around = {"grad": lambda g: grad(lambda w: g(w).sum())(w), "vmap": lambda g: vmap(g)(torch.stack([w, w]))}
    instead = {"composite_grads": r"torch\.vmap\(encode_fn", "explain": "written out"}[called]
    with pytest.raises(ArgumentError, match=rf"{called}: expected .* inside torch.func.{transform}\..*{instead}"):
        around[transform](calls[called])


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
    if engine == "traced":
        with pytest.raises(LossError, match=rf"(?s)cannot be {engine}: .*engine='eager'"):
            per_sample_grads(scaled, w, xs, engine=engine)
    else:
        assert_trees_close(per_sample_grads(scaled, w, xs, engine=engine), norms.sum() * rows, rtol=1e-9)
    assert_trees_close(grad(outer)(w), norms.sum() * rows[0], rtol=1e-9)


ENSEMBLE = {**REDUCTIONS, "Stack": Stack(), "Gram": Gram(), "Variance": Variance(), "NoiseScale": NoiseScale()}


@pytest.mark.parametrize("engine", ["eager", "traced"])
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
