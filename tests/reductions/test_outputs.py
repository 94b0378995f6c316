"""Losses with K outputs: every reduction against the Jacobians of ``torch.func.jacrev``."""

from __future__ import annotations

import warnings

import pytest
import torch
from grid import REDUCTIONS, damping, like_params, one_direction, reals
from oracle import Rows, assert_trees_close, error_of
from torch import nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import persample as ps
from persample import ArgumentError, LossError, accumulate, explain, fisher_vector_product, per_sample_grads
from persample.factors import Dense

F64 = torch.float64
NAN = float("nan")


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def of_model(model, *batch):
    """A loss that calls a model; its parameters by name, and the batch."""
    model = model.to(F64)
    params = {name: x.detach() for name, x in model.named_parameters()}
    return lambda params, x: functional_call(model, params, (x,)), params, batch


def mlp():
    return of_model(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), draw(5, 4))


class _Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.second, self.last = nn.Conv2d(4, 4, 2, stride=2, groups=2, bias=False), nn.Linear(16, 3)

    def forward(self, x):
        x = self.norm(torch.relu(self.first(x[None])))
        return self.last(torch.tanh(self.second(x)).flatten())


def cnn():
    return of_model(_Cnn(), draw(4, 2, 4, 4))


class _Rnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.step, self.head = nn.Linear(7, 4), nn.Linear(4, 3)

    def forward(self, x):
        h, states = x.new_zeros(4), []
        for row in x:
            h = self.step(torch.cat([row, h])).tanh()
            states.append(h)
        return self.head(torch.stack(states)).sum(0).tanh()


def rnn():
    return of_model(_Rnn(), draw(4, 5, 3))


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.head = (
            nn.Embedding(7, 4, padding_idx=0),
            nn.Linear(4, 12, bias=False),
            nn.Linear(4, 3),
        )
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(self.embed(x))).chunk(3, -1)
        return self.head(torch.softmax(q @ k.mT, -1) @ v).mean(0)


def attention():
    return of_model(_Attention(), torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(0)))


def functional():
    """Tied weights, a bare vector, a complex matrix, an ignored parameter, aux."""
    params = {"table": draw(6, 4), "v": draw(4), "c": torch.complex(draw(3, 4), draw(3, 4, seed=1)), "none": draw(2)}

    def loss(params, index, x):
        looked_up = (params["table"][index] * params["v"]).tanh().sum(0)
        scores = params["table"] @ (looked_up + x)
        return (params["c"] @ x.to(params["c"].dtype)).abs() * scores[:3].sin(), {"scores": scores}

    return loss, params, (torch.randint(6, (5, 3), generator=torch.Generator().manual_seed(1)), draw(5, 4))


WORKLOADS = {make.__name__: make for make in (mlp, cnn, rnn, attention, functional)}


def jacobians(loss, params, batch):
    """The K gradients of every sample, ``[B, K, *shape]``, written out."""

    def outputs(params, *sample):
        returned = loss(params, *sample)
        return returned[0] if isinstance(returned, tuple) else returned

    leaves, structure = pytree.tree_flatten(params)
    pairs = [torch.view_as_real(x) if x.is_complex() else x for x in leaves]

    def of_reals(pairs, *sample):
        values = [torch.view_as_complex(x) if like.is_complex() else x for x, like in zip(pairs, leaves, strict=True)]
        return outputs(pytree.tree_unflatten(values, structure), *sample)

    dims = (None, *(0 for _ in batch))
    found = vmap(jacrev(of_reals), in_dims=dims)(pairs, *batch)
    found = [torch.view_as_complex(x) if like.is_complex() else x for x, like in zip(found, leaves, strict=True)]
    return Rows(found, vmap(outputs, in_dims=dims)(params, *batch), structure)


def of_output(rows, k):
    return Rows([g[:, k] for g in rows.grads], rows.losses[:, k], rows.structure)


def flat(rows):
    """The gradients of all outputs as those of B·K samples."""
    return Rows([g.flatten(0, 1) for g in rows.grads], rows.losses.flatten(), rows.structure)


def stacked(trees, axis):
    return pytree.tree_map(lambda *leaves: torch.stack(leaves, axis), *trees)


def as_vector(tree):
    leaves = [torch.view_as_real(x) if x.is_complex() else x for x in pytree.tree_leaves(tree)]
    return torch.cat([x.flatten() for x in leaves])


def solved(rows, matrix, right):
    return like_params(rows, torch.linalg.solve(matrix, right))


def gauss_newton(rows, v, centered=False, kept=0.0):
    """A dense solve with F = (1/B) Σᵢₖ gᵢₖ gᵢₖᵀ, of the distance to ``kept``, and the leverages of F."""
    size, every = len(rows.losses), flat(rows)
    if centered:
        v = v - v.mean(0)
        every = flat(Rows([g - g.mean(0) for g in rows.grads], rows.losses, rows.structure))
    g = reals(every)
    strength = damping(flat(rows))
    matrix = g.T @ g / size + strength * torch.eye(g.shape[1], dtype=F64)
    return solved(every, matrix, g.T @ v.flatten() / size + strength * kept), (
        g.T * torch.linalg.solve(matrix, g.T)
    ).sum(0) / size


BY_SAMPLE = {
    "none",
    "Stack",
    "Norm",
    "Norm-per_param",
    "Dot",
    "Dot-stacked",
    "Project",
    "Sketch",
    "Sketch-total",
    "Loss",
}
KINDS = ps.Gram, ps.CosineSimilarity
PAIRS = {"Gram", "CosineSimilarity", "Gram-own", "Gram-other", "CosineSimilarity-other"}
SOLVES = {
    "NaturalGradient": (
        lambda r: ps.NaturalGradient(damping(flat(r))),
        lambda r: gauss_newton(r, torch.ones_like(r.losses))[0],
    ),
    "NaturalGradient-targets": (
        lambda r: ps.NaturalGradient(damping(flat(r)), r.losses),
        lambda r: gauss_newton(r, r.losses)[0],
    ),
    "NaturalGradient-centered": (
        lambda r: ps.NaturalGradient(damping(flat(r)), r.losses, centered=True),
        lambda r: gauss_newton(r, r.losses, centered=True)[0],
    ),
    "NaturalGradient-qr": (
        lambda r: ps.NaturalGradient(damping(flat(r)), r.losses, centered=True, solver="qr"),
        lambda r: gauss_newton(r, r.losses, centered=True)[0],
    ),
    "NaturalGradient-previous": (
        lambda r: ps.NaturalGradient(damping(flat(r)), r.losses, previous=one_direction(flat(r), F64), momentum=1.0),
        lambda r: gauss_newton(r, r.losses, kept=as_vector(one_direction(flat(r), F64)))[0],
    ),
    "Leverage": (
        lambda r: ps.Leverage(damping(flat(r))),
        lambda r: gauss_newton(r, r.losses)[1].view(r.losses.shape),
    ),
}
OVER_SAMPLES = (
    set(REDUCTIONS) - BY_SAMPLE - PAIRS - {name for name in REDUCTIONS if name.startswith(("Nat", "Lev", "Fi"))}
)


def wanted_of(rows):
    wanted = {name: REDUCTIONS[name][0](of_output(rows, 0), F64) for name in BY_SAMPLE | OVER_SAMPLES | PAIRS}
    wanted |= {f"{kind.__name__}-{which}": kind(rows=which) for kind in KINDS for which in ("own", "trace")}
    return wanted | {name: make(rows) for name, (make, _) in SOLVES.items()}


def expected_of(rows):
    """What every reduction is for K outputs, from what it is for one."""
    size, count = rows.losses.shape
    each = [of_output(rows, k) for k in range(count)]
    found = {name: stacked([REDUCTIONS[name][1](one) for one in each], 1) for name in BY_SAMPLE}
    found |= {name: stacked([REDUCTIONS[name][1](one) for one in each], 0) for name in OVER_SAMPLES}
    found["EigenMoment"] = torch.utils._pytree.tree_map(lambda x: x.sum(0), found["EigenMoment"])  # F adds up
    pairs = {
        name: REDUCTIONS[name][1](flat(rows)).view(size, count, size, count) for name in ("Gram", "CosineSimilarity")
    }
    others = {f"{name}-other": x[:, :, 1:3, 0] for name, x in pairs.items()}
    others |= {f"{name}-own": torch.einsum("ikil->ikl", x) for name, x in pairs.items()}
    trace = torch.einsum("ikjk->ij", pairs["Gram"])
    norms = trace.diagonal().sqrt()
    cosines = torch.where(norms == 0, 0, trace / norms).T
    others |= {"Gram-trace": trace, "CosineSimilarity-trace": torch.where(norms == 0, 0, cosines / norms)}
    return found | pairs | others | {name: expected(rows) for name, (_, expected) in SOLVES.items()}


ENGINES = {
    "eager": {},
    "eager-chunks": {"chunk_size": 2},
    "loop": {"engine": "loop"},
    "auto": {"engine": "auto"},
}


def assert_all_close(results, expected):
    assert results.keys() == expected.keys()
    for name, one in expected.items():
        assert error_of(assert_trees_close, results[name], one, 1e-9, 1e-14) == "none", name


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_equals_jacrev(workload, engine):
    loss, params, batch = WORKLOADS[workload]()
    rows, calls = jacobians(loss, params, batch), []

    def counted(*args):
        calls.append(1)
        return loss(*args)

    results = per_sample_grads(counted, params, batch, wanted_of(rows), outputs="rows", **ENGINES[engine])
    assert_all_close(results, expected_of(rows))
    assert len(calls) == {"eager": 1, "loop": len(rows.losses)}.get(engine, len(calls))  # once for all outputs


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_one_by_one_equals_jacrev(workload, chunk_size):
    """Where no reduction asks for the gradients themselves, factors answer."""
    loss, params, batch = WORKLOADS[workload]()
    rows = jacobians(loss, params, batch)
    options = {"outputs": "rows", "chunk_size": chunk_size}
    results = {name: per_sample_grads(loss, params, batch, one, **options) for name, one in wanted_of(rows).items()}
    assert_all_close(results, expected_of(rows))


# What one program computes: every kind of contraction.
COMPILED = ("Stack", "Norm", "ClippedMean", "Gram", "CosineSimilarity", "NoiseScale", "NaturalGradient", "Project")


@pytest.mark.parametrize("workload", ["cnn", "rnn", "functional"])
def test_traced_programs_equal_jacrev(workload):
    loss, params, batch = WORKLOADS[workload]()
    rows = jacobians(loss, params, batch)
    wanted, expected = wanted_of(rows), expected_of(rows)
    results = per_sample_grads(
        loss, params, batch, {name: wanted[name] for name in COMPILED}, outputs="rows", engine="traced"
    )
    assert_all_close(results, {name: expected[name] for name in COMPILED})


def test_programs_take_any_number_of_samples():
    params, x = {"a": draw(6, 4), "b": draw(3, 6)}, draw(4, 4)

    def loss(params, x):
        return params["b"] @ torch.tanh(params["a"] @ x)

    wanted = {"gram": ps.Gram(), "clipped": ps.ClippedMean(0.5)}
    for size in (4, 3, 2):
        results = per_sample_grads(loss, params, (x[:size],), wanted, outputs="rows", engine="traced")
        assert_all_close(results, per_sample_grads(loss, params, (x[:size],), wanted, outputs="rows"))
    programs = explain(loss, params, (x,), ps.Gram(), outputs="rows", engine="traced").compilations
    assert [program.batch_size for program in programs] == [4, None]


MODELS = {
    "gru": (nn.GRU(3, 4, num_layers=2), lambda m, x: m(x)[0].sum(0).tanh(), (5, 3)),
    "lstm": (nn.LSTM(3, 4, bidirectional=True), lambda m, x: m(x)[0].sum(0).tanh(), (5, 3)),
    "transformer": (
        nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True),
        lambda m, x: m(x[None])[0].mean(0),
        (5, 4),
    ),
    "fused attention": (
        nn.Linear(8, 24),
        lambda m, x: F.scaled_dot_product_attention(*m(x).view(5, 3, 2, 4).permute(1, 2, 0, 3)).tanh().sum((0, 1)),
        (5, 8),
    ),
    "transposed convolution": (
        nn.Sequential(nn.ConvTranspose2d(2, 4, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 81, 3)),
        lambda m, x: m(x[None])[0],
        (2, 4, 4),
    ),
    "dilated convolution": (
        nn.Sequential(nn.Conv1d(2, 8, 3, dilation=2, padding="same"), nn.Tanh(), nn.Conv1d(8, 30, 3)),
        lambda m, x: m(x[None])[0].mean(1)[:3],
        (2, 12),
    ),
    "bilinear": (nn.Bilinear(3, 4, 5), lambda m, x: m(x[:3], x[3:]).tanh(), (7,)),
}
SOME = {"stack": None, "norm": ps.Norm(), "gram": ps.Gram(), "cosines": ps.CosineSimilarity(), "sum": ps.Sum()}


@pytest.mark.parametrize("name", MODELS)
def test_rules_of_vmap_serve_all_outputs(name):
    model, loss, shape = MODELS[name]
    batch = (draw(3, *shape),)
    results = per_sample_grads(loss, model.double(), batch, SOME, outputs="rows")
    assert_all_close(results, per_sample_grads(loss, model, batch, SOME, outputs="rows", engine="loop"))


def wide_models():
    """Layers whose gradients are larger than their factors, the loss, and the kind of factor of the first parameter."""
    steps = nn.Sequential(nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 3)).double()
    images = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32 * 4, 3)).double()
    return {
        "linear": (steps, lambda m, x: m(x), draw(6, 50)),
        "linear of 2 steps": (steps, lambda m, x: m(x).sum(0), draw(6, 2, 50)),
        "convolution": (images, lambda m, x: m(x[None])[0], draw(6, 16, 4, 4)),
    }


@pytest.mark.parametrize("name", wide_models())
def test_inputs_are_stored_once(name):
    """The signals of all outputs lie beside the inputs, of which there is one for each sample."""
    model, loss, x = wide_models()[name]
    factors = per_sample_grads(loss, model, (x,), {"f": ps.Factored(), "g": ps.Gram()}, outputs="rows")["f"]
    weight = next(iter(factors.values()))
    signals, inputs = weight.tensors
    parameter = next(model.parameters())
    assert weight.shape == (3, *parameter.shape)
    assert not isinstance(weight, Dense)
    assert (inputs.numel(), inputs.untyped_storage().nbytes()) == (x.numel(), 8 * x.numel())
    assert signals.numel() == 6 * 3 * parameter.shape[0] * weight.num_terms


@pytest.mark.parametrize("name", wide_models())
def test_factors_equal_the_loop(name):
    """One reduction after the other, so that only the factors' own operations are called."""
    model, loss, x = wide_models()[name]
    directions = {name: draw(2, *p.shape) for name, p in model.named_parameters()}
    wanted = {
        "norm": ps.Norm(),
        "each": ps.Norm(per_param=True),
        "dot": ps.Dot(directions, stacked=True),
        "gram": ps.Gram(),
        "cosines": ps.CosineSimilarity(),
        "project": ps.Project(5, seed=0),
        "clipped": ps.ClippedSum(0.5),
        "sum": ps.Sum(),
        "second": ps.SecondMoment(),
        "variance": ps.Variance(),
        "noise": ps.NoiseScale(),
        "natural": ps.NaturalGradient(1.0),
        "leverage": ps.Leverage(1.0),
    }
    results = {name: per_sample_grads(loss, model, (x,), one, outputs="rows") for name, one in wanted.items()}
    assert_all_close(results, per_sample_grads(loss, model, (x,), wanted, outputs="rows", engine="loop"))


def test_chunks_store_inputs_once():
    model, loss, x = wide_models()["linear"]
    weight = per_sample_grads(loss, model, (x,), ps.Factored(), outputs="rows", chunk_size=4)["0.weight"]
    assert weight.tensors[1].numel() == x.numel()


def test_tables_are_not_written_out():
    table, index = draw(500, 40), torch.randint(500, (4, 6), generator=torch.Generator().manual_seed(0))

    def loss(table, index):
        return F.embedding(index, table).tanh().sum(0)[:3] + table[index].sin().sum(0)[:3]

    rows = explain(loss, table, (index,), ps.Gram(), outputs="rows").rows
    assert [(row.factor, row.choice, row.steps) for row in rows] == [("Embedding", "contract", 12)]
    assert_all_close(
        *(per_sample_grads(loss, table, (index,), SOME, outputs="rows", engine=e) for e in ("eager", "loop"))
    )


@pytest.mark.parametrize("engine", ["eager", "loop"])
@pytest.mark.parametrize("size", [0, 1])
def test_few_samples(size, engine):
    loss, params, (x,) = mlp()
    wanted = SOME | {"norms": ps.Norm(per_param=True), "dot": ps.Dot(params), "loss": ps.Loss()}
    wanted |= {"clipped": ps.ClippedSum(1.0, per_param=True), "weighted": ps.WeightedSum(torch.exp)}
    results = per_sample_grads(loss, params, (x[:size],), wanted, outputs="rows", engine=engine)
    whole = per_sample_grads(loss, params, (x,), wanted, outputs="rows")
    for name in ("stack", "norm", "norms", "dot", "loss"):
        assert_trees_close(results[name], pytree.tree_map(lambda rows: rows[:size], whole[name]), 1e-9)
    for name in ("gram", "cosines"):
        assert_trees_close(results[name], whole[name][:size, :, :size], 1e-9)
    for name in ("sum", "clipped", "weighted"):
        pairs = zip(results[name].values(), whole[name].values(), strict=True)
        assert all(total.shape == of_all.shape and bool(total.any()) == (size > 0) for total, of_all in pairs)


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_one_output_is_a_scalar_loss(engine):
    loss, params, batch = mlp()
    wanted = {**SOME, "noise": ps.NoiseScale(), "natural": ps.NaturalGradient(0.1), "leverage": ps.Leverage(0.1)}
    rows = per_sample_grads(lambda p, x: loss(p, x)[:1], params, batch, wanted, outputs="rows", engine=engine)
    scalars = per_sample_grads(lambda p, x: loss(p, x)[0], params, batch, wanted, engine=engine)
    for one, expected in zip(pytree.tree_leaves(rows), pytree.tree_leaves(scalars), strict=True):
        assert_trees_close(one.reshape(expected.shape), expected, 1e-9)


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_weights_count_samples_and_remove_nan(engine):
    loss, params, (x,) = mlp()
    spoilt, weights, kept = x.clone(), torch.tensor([1.0, 0.0, 2.0, 1.0, 0.5]), [0, 2, 3, 4]
    spoilt[1] = NAN
    wanted = {"sum": ps.Sum(), "clipped": ps.ClippedMean(0.5), "variance": ps.Variance(), "noise": ps.NoiseScale()}
    wanted |= {"natural": ps.NaturalGradient(0.1), "centered": ps.NaturalGradient(0.1, centered=True)}
    options = {"outputs": "rows", "engine": engine}
    results = per_sample_grads(loss, params, (spoilt,), wanted, weights=weights, **options)
    assert_all_close(results, per_sample_grads(loss, params, (x[kept],), wanted, weights=weights[kept], **options))


def test_weight_two_counts_twice():
    loss, params, (x,) = mlp()
    wanted = {"natural": ps.NaturalGradient(0.1), "mean": ps.ClippedMean(0.5), "second": ps.SecondMoment()}
    weights = torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0])
    results = per_sample_grads(loss, params, (x,), wanted, weights=weights, outputs="rows")
    assert_all_close(results, per_sample_grads(loss, params, (x[[0, 1, 1, 2, 3, 4]],), wanted, outputs="rows"))


def test_nan_stays_in_its_output():
    """A NaN scale spoils the sum of its own output, all of it."""
    x = torch.tensor([[2.0, 0.0], [0.5, 0.0]], dtype=F64)
    scale = ps.WeightedSum(lambda norm: (1 - norm).sqrt())
    total = per_sample_grads(lambda w, x: torch.stack([w @ x, w @ x / 4]), draw(2), (x,), scale, outputs="rows")
    assert total[0].isnan().all()
    assert total[1].isfinite().all()


@pytest.mark.parametrize("exponent", [-25, 15])
def test_extreme_numbers_in_float32(exponent):
    x = draw(3, 4).float() * 10.0**exponent
    wanted = {"norm": ps.Norm(), "cosines": ps.CosineSimilarity(), "clipped": ps.ClippedSum(1.0)}

    def loss(w, x):
        return torch.stack([w[0] @ x, 1e-5 * (w[1] @ x), 0 * w[2].sum()])

    found = per_sample_grads(loss, torch.zeros(3, 4), (x,), wanted, outputs="rows")
    exact = per_sample_grads(loss, torch.zeros(3, 4, dtype=F64), (x.double(),), wanted, outputs="rows", engine="loop")
    for name, one in exact.items():
        for k in range(2):  # the numbers of the outputs are of different magnitudes
            part = (k,) if name == "clipped" else (slice(None), k)
            assert_trees_close(found[name][part], one[part], 1e-5)


OWN = {"own parameters": ((0, 0), 1), "a shared argument": ((None, (0, None)), 2), "keep_batch_dim": ((None, 0), 1)}


@pytest.mark.parametrize("engine", ["eager", "loop"])
@pytest.mark.parametrize("name", OWN)
def test_arguments(name, engine):
    (params_dim, dims), count = OWN[name]
    w = draw(5, 3, 4) if params_dim == 0 else draw(3, 4)
    batch = (draw(5, 4), torch.tensor(2.0, dtype=F64))[:count]
    keep = name == "keep_batch_dim"

    def loss(w, x, scale=1.0):
        return ((x @ w.mT).sin() * scale).flatten()

    found = per_sample_grads(
        loss, w, batch, in_dims=(params_dim, dims), keep_batch_dim=keep, outputs="rows", engine=engine
    )
    in_dims = (params_dim, *([dims] if count == 1 else dims))
    assert_trees_close(found, vmap(jacrev(loss), in_dims=in_dims)(w, *batch), 1e-9)


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_modules_frozen_and_tied(engine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 4)).double().eval()
    model[2].weight = model[0].weight
    model[1].weight.requires_grad_(False)
    params = {name: x.detach() for name, x in model.named_parameters()}

    def outputs(params, x):
        return functional_call(model, params, (x[None],))[0]

    x = draw(3, 4)
    found = per_sample_grads(lambda m, x: m(x[None])[0], model, (x,), outputs="rows", engine=engine)
    expected = vmap(jacrev(outputs), in_dims=(None, 0))(params, x)
    expected.pop("1.weight")
    assert_trees_close(found, expected, 1e-9)


def test_out():
    loss, params, batch = mlp()
    wanted = {"stack": None, "norm": ps.Norm(), "sum": ps.Sum()}
    expected = per_sample_grads(loss, params, batch, wanted, outputs="rows")
    out = pytree.tree_map(torch.zeros_like, expected)
    assert per_sample_grads(loss, params, batch, wanted, outputs="rows", out=out) is out
    assert_all_close(out, expected)


def test_gram_with_other_numbers_of_outputs():
    """Of two losses: K outputs against K' and against one."""
    loss, params, (x,) = mlp()
    losses = {"rows": loss, "two": lambda p, x: loss(p, x)[:2], "scalar": lambda p, x: loss(p, x).sum()}
    matrices, factors = {}, {}
    for name, one in losses.items():
        options = {} if name == "scalar" else {"outputs": "rows"}
        stacked = per_sample_grads(one, params, (x,), **options)
        lead = 1 if name == "scalar" else 2
        matrices[name] = torch.cat([g.flatten(lead) for g in pytree.tree_leaves(stacked)], lead)
        factors[name] = per_sample_grads(one, params, (x,), ps.Factored(), **options)
    for left, right in [("rows", "two"), ("rows", "scalar"), ("scalar", "two")]:
        options = {} if left == "scalar" else {"outputs": "rows"}
        wanted = {"gram": ps.Gram(factors[right]), "cosines": ps.CosineSimilarity(factors[right])}
        found = per_sample_grads(losses[left], params, (x,), wanted, **options)
        g, h = matrices[left], matrices[right]
        expected = torch.tensordot(g, h, ([-1], [-1]))
        assert_trees_close(found["gram"], expected, 1e-9)
        sizes = torch.tensordot(g.norm(dim=-1), h.norm(dim=-1), 0)
        assert_trees_close(found["cosines"], expected / sizes, 1e-9)


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_streams(engine, tmp_path):
    loss, params, (x,) = mlp()
    wanted = {"stack": None, "norm": ps.Norm(), "noise": ps.NoiseScale(), "mean": ps.ClippedMean(0.5)}
    expected = per_sample_grads(loss, params, (x,), wanted, outputs="rows")
    batches, options = list(x.split(2)), {"outputs": "rows", "engine": engine}
    pairs = {"gram": ps.Gram(), "natural": ps.NaturalGradient(0.1)}
    assert_all_close(accumulate(loss, params, batches, wanted, sink=tmp_path / "sink", **options), expected)
    expected |= per_sample_grads(loss, params, (x,), pairs, outputs="rows")
    assert_all_close(accumulate(loss, params, batches, wanted | pairs, **options), expected)


def test_fisher_products_add_up_over_outputs():
    loss, params, batch = mlp()
    rows = jacobians(loss, params, batch)
    g, size = reals(flat(rows)), len(rows.losses)
    found = fisher_vector_product(loss, params, batch, params, outputs="rows")
    v = reals(Rows([x[None] for x in pytree.tree_leaves(params)], rows.losses, rows.structure))[0]
    assert_trees_close(found, like_params(of_output(rows, 0), g.T @ (g @ v) / size), 1e-9)


def test_under_a_transform():
    loss, params, batch = mlp()
    scales = torch.tensor([1.0, 2.0], dtype=F64)
    found = vmap(lambda s: per_sample_grads(lambda p, x: s * loss(p, x), params, batch, ps.Norm(), outputs="rows"))(
        scales
    )
    norms = per_sample_grads(loss, params, batch, ps.Norm(), outputs="rows")
    assert_trees_close(found, torch.stack([norms, 2 * norms]), 1e-9)


def vector(w, x):
    return w @ x


LOSSES = {
    "scalar": (lambda w, x: (w @ x).sum(), r"expected to return one real vector \[K\].*shape \[\].*outputs='scalar'"),
    "matrix": (lambda w, x: (w @ x)[None], r"received shape \[1, 3\].*\.flatten\(\)"),
    "nothing": (lambda w, x: (w @ x)[:0], r"received shape \[0\]"),
    "tuple": (lambda w, x: tuple(w @ x), "received a tuple of 3"),
    "whole numbers": (lambda w, x: (w @ x).long(), "received dtype torch.int64"),
    "unconnected": (lambda w, x: x, "depends on none of them"),
}


@pytest.mark.parametrize("engine", ["eager", "loop", "traced", "compiled"])
@pytest.mark.parametrize("name", LOSSES)
def test_wrong_losses(name, engine):
    loss, match = LOSSES[name]
    with pytest.raises(LossError, match=match):
        per_sample_grads(loss, draw(3, 4), draw(2, 4), outputs="rows", engine=engine)


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_a_vector_without_the_option(engine):
    with pytest.raises(LossError, match=r"received shape \[3\].*Or pass outputs='rows'"):
        per_sample_grads(vector, draw(3, 4), draw(2, 4), engine=engine)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}], ids=["at once", "chunks"])
@pytest.mark.parametrize("reduce", [ps.Stack(), ps.Norm(), ps.Sum(), ps.Variance()], ids=lambda r: type(r).__name__)
def test_different_numbers_of_outputs(reduce, options):
    def loss(w, x):
        return (w @ x)[: 1 + int(x[0] > 0)]

    x = torch.tensor([[1.0, 2.0], [-1.0, 2.0]])
    match = "same number of outputs" + (r" \(outputs='rows'\) and aux of the same shapes" if options else " for every")
    with pytest.raises(LossError, match=match):
        per_sample_grads(loss, torch.ones(3, 2), x, reduce, outputs="rows", engine="loop", **options)


@pytest.mark.parametrize("reduce", [ps.Stack(), ps.Sum()], ids=lambda r: type(r).__name__)
def test_different_numbers_of_outputs_in_a_stream(reduce):
    with pytest.raises(LossError, match=r"expected (rows like those of earlier batches|results of one shape)"):
        accumulate(lambda x, y: (x * y).sum(1), draw(1, 2), [draw(2, 3, 2), draw(2, 1, 2)], reduce, outputs="rows")


TARGETS = {
    "tensor": (torch.ones(2), r"targets: expected shape \[2, 3\], received shape \[2\]"),
    "function": (lambda aux: aux[0], r"a function that returns a real tensor \[3\], received one that returns shape"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_wrong_targets(name):
    targets, match = TARGETS[name]
    with pytest.raises(ArgumentError, match=match):
        per_sample_grads(
            lambda w, x: (w @ x, x), draw(3, 4), draw(2, 4), ps.NaturalGradient(0.1, targets), outputs="rows"
        )


@pytest.mark.parametrize("call", [per_sample_grads, explain, lambda *a, **k: accumulate(*a[:2], [a[2]], **k)])
def test_the_option_is_checked(call):
    with pytest.raises(ArgumentError, match="outputs: expected 'scalar' or 'rows', received 'vector'"):
        call(vector, draw(3, 4), draw(2, 4), outputs="vector")


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda w, x: torch.linalg.solve(w * x, x).sin(),
        torch.linalg.solve,
        lambda w, x: torch.stack([torch.logdet((w * x) @ (w * x).T + torch.eye(4).double()), x @ w @ x]),
        lambda w, x: torch.linalg.slogdet(w * x + 3 * torch.eye(4))[1][None],
    ],
    ids=["solve", "solve of shared", "logdet", "slogdet"],
)
def test_factorizations_equal_the_loop(loss_fn):
    """Torch batches their backward passes wrongly where vmap stands inside of vmap."""
    w = torch.randn(4, 4, dtype=torch.float64) + 3 * torch.eye(4)
    x = torch.randn(5, 4, dtype=torch.float64)
    expected = ps.per_sample_grads(loss_fn, w, x, outputs="rows", engine="loop")
    assert_trees_close(ps.per_sample_grads(loss_fn, w, x, outputs="rows"), expected, 1e-9)


def test_gram_with_a_table_of_another_batch():
    table, tokens = torch.randn(7, 5, dtype=torch.float64), torch.randint(7, (6, 4))

    def outputs(table, tokens):
        return torch.nn.functional.embedding(tokens, table).tanh().sum(0)

    other = ps.per_sample_grads(outputs, table, tokens[:2], ps.Factored(), outputs="rows")
    every = ps.per_sample_grads(outputs, table, tokens, ps.Gram(), outputs="rows")
    found = ps.per_sample_grads(outputs, table, tokens, ps.Gram(other), outputs="rows")
    assert_trees_close(found, every[:, :, :2], 1e-9)


def _rows_cases():
    table, x, tokens = torch.randn(1100, 3), torch.randn(3, 4, 3), torch.randint(1100, (3, 4))
    square, y = torch.randn(4, 4), torch.randn(3, 5, 4)

    def entropy(w, x, t):
        return F.cross_entropy(x @ w.T, t, reduction="none", ignore_index=7)

    def attention(w, x):
        return F.scaled_dot_product_attention((x @ w)[None], x[None], x[None])[0].sum(-1)

    cases = {
        "cross_entropy": (entropy, table, (x, tokens)),
        "cross_entropy, shared": (lambda w, x, t: entropy(w, x, t) * entropy(w, x, t).sum(), table, (x, tokens)),
        "nll_loss": (
            lambda w, x, t: F.nll_loss((x @ w.T).log_softmax(-1), t, reduction="none"),
            *(table, (x, tokens)),
        ),
        "attention": (attention, square, (y,)),
        "cdist": (lambda w, x: torch.cdist(w, x, 1.5).sum(1), square, (y,)),
        "cumprod": (lambda w, x: (w[0] * x[0]).cumprod(0), square, (y,)),
        "layer_norm": (lambda w, x: F.layer_norm(x @ w, (4,), w[0]).sum(-1), square, (y,)),
        "rnn": (
            lambda w, x: torch.rnn_tanh(x[None], x.new_zeros(1, 1, 4), [w, w], False, 1, 0.0, False, False, True)[0][
                0
            ].sum(-1),
            *(square, (y,)),
        ),
        "embedding_bag": (lambda w, t: F.embedding_bag(t[None], w, mode="max")[0], table, (tokens,)),
    }
    if hasattr(F, "linear_cross_entropy"):
        cases["linear_cross_entropy"] = (
            lambda w, x, t: F.linear_cross_entropy(x, w, t, reduction="none"),
            *(table, (x, tokens)),
        )
    return cases


@pytest.mark.parametrize("mapped", [False, True], ids=["", "mapped"])
@pytest.mark.parametrize("name", ["cross_entropy", *(name for name in _rows_cases() if name != "cross_entropy")])
def test_rules_serve_rows_without_a_fallback(name, mapped):
    """No warning: the test run turns it into an error."""
    loss, params, batch = _rows_cases()[name]
    params = params.double()
    batch = [x.double() if x.is_floating_point() else x for x in batch]

    def rows(*sample, engine="eager"):
        return per_sample_grads(loss, params, tuple(x[None] for x in sample), outputs="rows", engine=engine)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.func.vmap(rows)(*batch)[:, 0] if mapped else per_sample_grads(loss, params, batch, outputs="rows")
    expected = torch.cat([rows(*sample, engine="loop") for sample in zip(*batch, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
