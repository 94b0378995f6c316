"""``differentiable=True``: graphs for plain autograd, where there is one, and the edges of the derivatives."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from oracle import assert_trees_close
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import persample as ps
from persample import ArgumentError, LossError, per_sample_grads

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
D = torch.float64
ENGINES = ["eager", "compiled", "auto", "loop"]


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def f(w, x):
    return torch.tanh(w @ x)


def naive_rows(loss, params, xs):
    """Rows of the naive loop, with a graph; the gradients of the parameters joined."""
    rows = [torch.autograd.grad(loss(x), params, create_graph=True) for x in xs]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def clipped_mean(rows, bound):
    return ((bound / rows.norm(dim=1)).clamp(max=1)[:, None] * rows).mean(0)


MODELS = {
    "MLP": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    "CNN": lambda: nn.Sequential(
        nn.Unflatten(0, (1, 1, 3)), nn.Conv1d(1, 2, 2), nn.GELU(), nn.Flatten(0), nn.Linear(4, 2)
    ),
    "norms": lambda: nn.Sequential(
        nn.Linear(3, 8),
        nn.Unflatten(0, (2, 2, 2)),
        nn.BatchNorm1d(2, track_running_stats=False),
        nn.InstanceNorm1d(2, affine=True),
        nn.GroupNorm(1, 2),
        nn.LayerNorm((2, 2)),
        nn.Tanh(),
    ),
    "GRU": lambda: nn.Sequential(nn.Unflatten(0, (3, 1)), nn.GRU(1, 2)),
    "attention": lambda: nn.Sequential(nn.Unflatten(0, (1, 3, 1)), nn.Linear(1, 4), Attention(), nn.Flatten(0)),
}


class Attention(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)


def model_loss(model, x):
    y = model(x)
    return (y[0] if isinstance(y, tuple) else y).square().sum()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_modules(name, engine):
    torch.manual_seed(0)
    model, xs = MODELS[name]().double(), normal(4, 3).requires_grad_()
    wanted = [*model.parameters(), xs]
    with sdpa_kernel(SDPBackend.MATH):  # plain autograd differentiates no other kernel twice
        rows = naive_rows(lambda x: model_loss(model, x), list(model.parameters()), xs)
        expected = torch.autograd.grad(clipped_mean(rows, 0.3).sin().sum(), wanted)
    with sdpa_kernel(SDPBackend.MATH) if engine == "loop" else nullcontext():
        update = per_sample_grads(model_loss, model, xs, ps.ClippedMean(0.3), engine=engine, differentiable=True)
    found = torch.autograd.grad(torch.cat([g.flatten() for g in update.values()]).sin().sum(), wanted)
    assert_trees_close(found, expected, rtol=1e-9, atol=1e-12)


SPELLINGS = {
    "chunks": {"chunk_size": 3},
    "one sample a chunk": {"chunk_size": 1},
    "own parameters": {"in_dims": (0, 0)},
    "kept axis": {"keep_batch_dim": True},
}


@pytest.mark.parametrize("engine", ["eager", "loop"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_options(spelling, engine):
    w, xs = normal(3).requires_grad_(), normal(4, 3, seed=1)
    given = w.expand(4, 3) if spelling == "own parameters" else w
    options = {"engine": engine, "differentiable": True, **SPELLINGS[spelling]}
    found = per_sample_grads(
        lambda w, x: f(w, x.flatten()), given, xs, ps.Variance(0) if "chunk" in spelling else ps.Norm(), **options
    )
    rows = naive_rows(lambda x: f(w, x), [w], xs)
    expected = rows.var(0, correction=0) if "chunk" in spelling else rows.norm(dim=1)
    pairs = (torch.autograd.grad(x.sin().sum(), w) for x in (found, expected))
    assert_trees_close(*pairs, rtol=1e-9)


def test_second_derivatives_and_finite_differences():
    w, xs = normal(3).requires_grad_(), normal(4, 3, seed=1)
    for reduce in (ps.ClippedMean(0.3), ps.NoiseScale(), ps.NaturalGradient(0.1), ps.CosineSimilarity()):

        def result(w, reduce=reduce):
            found = per_sample_grads(f, w, xs, reduce, differentiable=True)
            return found.noise_scale if isinstance(reduce, ps.NoiseScale) else found

        assert torch.autograd.gradcheck(result, w)
        assert torch.autograd.gradgradcheck(result, w)


def test_without_grad_mode_or_a_leaf_there_is_no_graph():
    w, xs = normal(3), normal(4, 3, seed=1)

    def result(w):
        return per_sample_grads(f, w, xs, ps.Mean(), differentiable=True)

    assert not result(w).requires_grad
    with torch.no_grad():
        assert not result(w.clone().requires_grad_()).requires_grad
    with torch.inference_mode():
        assert not result(w).requires_grad


@pytest.mark.parametrize("engine", ENGINES)
def test_what_the_loss_closes_over_is_differentiated(engine):
    w, xs, c = normal(3), normal(4, 3, seed=1), torch.tensor(0.5, dtype=D, requires_grad=True)
    found = per_sample_grads(lambda w, x: f(c * w, x), w, xs, ps.Sum(), engine=engine, differentiable=True)
    expected = jacrev(lambda c: grad(lambda w: vmap(lambda x: f(c * w, x))(xs).sum())(w).sum())(c.detach())
    assert_trees_close(torch.autograd.grad(found.sum(), c)[0], expected, rtol=1e-9)


# --- Where derivatives are delicate: gradients of zero, weights of zero, samples that are removed.
ZERO = torch.zeros(3, dtype=D)
AT_ZERO = {
    "Norm": (ps.Norm(), lambda g: torch.linalg.vector_norm(g, dim=1)),
    "Norm, per_param": (ps.Norm(per_param=True), lambda g: torch.linalg.vector_norm(g, dim=1)),
    "ClippedSum": (ps.ClippedSum(0.1), lambda g: torch.cat([g[:1], 0.1 * g[1:] / g[1:].norm(dim=1)[:, None]]).sum(0)),
    "CosineSimilarity": (
        ps.CosineSimilarity(),
        lambda g: (g[1:] @ g[1:].T) / g[1:].norm(dim=1).outer(g[1:].norm(dim=1)),
    ),
}


@pytest.mark.parametrize("way", ["grad", "jvp", "autograd"])
@pytest.mark.parametrize("name", AT_ZERO)
def test_zero_gradients_have_derivatives_as_vector_norm_has(name, way):
    reduce, plain = AT_ZERO[name]
    xs = torch.cat([ZERO[None], normal(2, 3)])

    def result(xs):
        found = per_sample_grads(
            lambda w, x: w @ x, torch.ones(3, dtype=D), xs, reduce, differentiable=way == "autograd"
        )
        return found[1:, 1:] if name == "CosineSimilarity" else found  # the others are 0, and constant

    if way == "jvp":
        found, expected = (jvp(g, (xs,), (torch.ones_like(xs),))[1] for g in (result, plain))
    elif way == "grad":
        found, expected = (grad(lambda xs, g=g: g(xs).sin().sum())(xs) for g in (result, plain))
    else:
        leaf = xs.clone().requires_grad_()
        found, expected = (torch.autograd.grad(g(leaf).sin().sum(), leaf)[0] for g in (result, plain))
    assert_trees_close(found, expected, rtol=1e-9)


def test_a_weight_of_zero_has_a_derivative():
    """Ren et al. (2018), "Learning to Reweight Examples": the weights of all samples begin at 0."""
    w, xs = normal(3), normal(4, 3, seed=1)
    rows = per_sample_grads(f, w, xs)
    found = jacrev(lambda weights: per_sample_grads(f, w, xs, ps.Sum(), weights=weights))(torch.zeros(4, dtype=D))
    assert_trees_close(found, rows.T, rtol=1e-12)


@pytest.mark.parametrize("reduce", [ps.Mean(), ps.Variance(), ps.NaturalGradient(0.1)])
def test_chunks_of_weight_zero_have_derivatives(reduce):
    w, xs, weights = normal(3), normal(4, 3, seed=1), torch.tensor([1.0, 2.0, 0.0, 0.0], dtype=D)

    def by_weights(**options):
        return jacrev(lambda v: per_sample_grads(f, w, xs, reduce, weights=v, **options))(weights)

    assert_trees_close(by_weights(chunk_size=2), by_weights(), rtol=1e-12)


@pytest.mark.parametrize("reduce", [ps.Mean(), ps.ClippedMean(0.1), ps.SecondMoment(), ps.NaturalGradient(0.1)])
def test_removed_samples_may_be_nan(reduce):
    w, xs = normal(3), normal(4, 3, seed=1)
    rotten = torch.cat([xs[:3], torch.full((1, 3), torch.nan, dtype=D)])

    def by_weights(xs):
        return jacrev(lambda v: per_sample_grads(f, w, xs, reduce, weights=torch.cat([v, v.new_zeros(1)])))

    weights = torch.tensor([1.0, 2.0, 0.5], dtype=D)
    assert_trees_close(by_weights(rotten)(weights), by_weights(xs)(weights), rtol=1e-12)


@pytest.mark.parametrize("reduce", [ps.NaturalGradient(0.0), ps.Leverage(0.0), ps.NaturalGradient(0.0, centered=True)])
def test_minimum_norm_solutions_have_derivatives(reduce):
    xs = normal(3, 2, seed=1)  # of rank 2, so that eigenvalues of zero are left out
    w = normal(2).requires_grad_()
    assert torch.autograd.gradcheck(lambda w: per_sample_grads(f, w, xs, reduce, differentiable=True), w)


@pytest.mark.parametrize("size", [64, 65, 130])
def test_minimum_norm_solutions_of_many_samples_have_derivatives(size):
    """More than a block of the Gram matrix, of which only the lower triangle is computed."""
    xs, w, weights = normal(size, 2, seed=1), normal(2), torch.linspace(0.5, 1.5, size, dtype=D)
    direction = torch.linspace(-1, 1, size, dtype=D)

    def step(weights):
        return per_sample_grads(f, w, xs, ps.NaturalGradient(0.0), weights=weights)

    _, tangent = jvp(step, (weights,), (direction,))
    around = [step(weights + h * direction) for h in (1e-5, -1e-5)]
    assert_trees_close(tangent, (around[0] - around[1]) / 2e-5, rtol=1e-6)


# --- Ensembles.
@pytest.mark.parametrize("engine", ["eager", "compiled", "auto"])
def test_an_ensemble_of_modules(engine):
    torch.manual_seed(0)
    models, xs = [MODELS["MLP"]().double() for _ in range(3)], normal(4, 3)
    params, buffers = torch.func.stack_module_state(models)

    def member(params, buffers, engine=engine):
        def loss(params, x):
            return functional_call(models[0], (params, buffers), (x,)).square().sum()

        return per_sample_grads(loss, params, xs, [ps.ClippedMean(0.3), ps.Norm(), ps.Project(4, 0)], engine=engine)

    found = vmap(member)(params, buffers)
    each = [member(dict(model.named_parameters()), {}, "loop") for model in models]
    assert_trees_close(found, torch.utils._pytree.tree_map(lambda *rows: torch.stack(rows), *each), rtol=1e-9)


SEVERAL = {
    "max_norm": lambda w, xs, c: per_sample_grads(f, w, xs, ps.ClippedMean(c)),
    "damping": lambda w, xs, c: per_sample_grads(f, w, xs, {"u": ps.NaturalGradient(c), "h": ps.Leverage(c)}),
    "weights": lambda w, xs, c: per_sample_grads(
        f, w, xs, [ps.Mean(), ps.Variance()], weights=c + torch.arange(4.0, dtype=D)
    ),
    "closed over": lambda w, xs, c: per_sample_grads(lambda w, x: f(c * w, x), w, xs, ps.NoiseScale()),
    "batch": lambda w, xs, c: per_sample_grads(f, w, c * xs, ps.Gram()),
    "none": lambda w, xs, c: per_sample_grads(f, w, xs[:0], [ps.Sum(), ps.Norm()]),
    "Fisher": lambda w, xs, c: ps.fisher_vector_product(f, w, xs, c * w),
}


@pytest.mark.parametrize("place", SEVERAL)
def test_vmap_over_hyperparameters(place):
    w, xs, values = normal(3), normal(4, 3, seed=1), torch.tensor([0.1, 0.2, 5.0], dtype=D)
    found = vmap(lambda c: SEVERAL[place](w, xs, c))(values)
    each = [SEVERAL[place](w, xs, c) for c in values]
    assert_trees_close(found, torch.utils._pytree.tree_map(lambda *rows: torch.stack(rows), *each), rtol=1e-9)


def test_vmap_over_seeds():
    w, xs = normal(2, 3), normal(4, 3, seed=1)

    def member(w):
        return per_sample_grads(lambda w, x: f(w, x * torch.rand_like(x)), w, xs, ps.Norm(), randomness="different")

    first = vmap(member, randomness="different")(w[:1].expand(2, 3))
    assert first.shape == (2, 4)
    assert first.unique().numel() == 8


# --- Refusals.
def test_memory_that_is_written_again_is_refused():
    w, xs, out = normal(3).requires_grad_(), normal(4, 3), torch.empty(4, dtype=D)
    with pytest.raises(ArgumentError, match=r"out: expected None with differentiable=True.*Leave it out"):
        per_sample_grads(f, w, xs, ps.Norm(), out=out, differentiable=True)
    for around in (grad, vmap):
        with pytest.raises(ArgumentError, match=r"out: expected None with torch.func's transforms"):
            around(lambda w: per_sample_grads(f, w[0], xs, ps.Norm(), out=out).sum())(
                w.detach().expand(1, 1, 3)[0] if around is grad else w.detach().expand(2, 1, 3)
            )


def test_a_stream_has_no_graph():
    w, xs = normal(3).requires_grad_(), normal(4, 3)
    with pytest.raises(ArgumentError, match=r"differentiable: expected False for a stream.*for each batch"):
        ps.accumulate(f, w, [xs], ps.Mean(), differentiable=True)
    for around in (lambda g: grad(g)(w.detach()), lambda g: vmap(g)(torch.stack([w, w]).detach())):
        with pytest.raises(
            ArgumentError, match=r"accumulate: expected .* outside of .* inside torch.func.*on one batch"
        ):
            around(lambda w: ps.accumulate(f, w, [xs], ps.Mean()).sum())


@pytest.mark.parametrize("engine", ["eager", "auto"])
def test_a_loss_that_vmap_cannot_batch(engine):
    w, xs = normal(3), normal(4, 3, seed=1)

    def call(w, engine=engine):
        return per_sample_grads(
            lambda w, x: f(w, x) * x[0].item(), w, xs, ps.Norm(), engine=engine, differentiable=True
        ).sum()

    with pytest.raises(LossError, match="reads values of a sample"):
        grad(call)(w)
    leaf = w.clone().requires_grad_()
    if engine == "auto":
        with pytest.warns(ps.FallbackWarning, match="one after another"):
            found = call(leaf)
        expected = naive_rows(lambda x: f(leaf, x) * x[0].item(), [leaf], xs).norm(dim=1).sum()
        assert_trees_close(*(torch.autograd.grad(x, leaf) for x in (found, expected)), rtol=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_without_its_parameters_is_an_error(engine):
    w, xs = normal(3).requires_grad_(), normal(4, 3)
    with pytest.raises(LossError, match="depends on none of them"):
        per_sample_grads(lambda _, x: f(w, x), w, xs, ps.Norm(), engine=engine, differentiable=True)
