"""Kronecker factors equal those of loops that tap every layer, and curvlinops' where it knows the layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from oracle import assert_trees_close
from torch import nn
from torch.nn import functional as F

import persample as ps
from persample import ClippedMean, KroneckerFactors, per_sample_grads
from persample.losses import td_loss
from persample.reductions import KroneckerFactor

BOTH = pytest.mark.parametrize("approximation", ["expand", "reduce"])
PATHS = [{}, {"chunk_size": 2}, {"engine": "loop"}, {"engine": "loop", "chunk_size": 3}]


class Tape:
    """Plain products whose inputs and outputs are remembered, use after use of a parameter."""

    def __init__(self):
        self.uses = []

    def linear(self, x, w, b=None):
        y = x @ w.T
        y = y if b is None else y + b
        y.retain_grad()
        self.uses += [(w, x, y)] if b is None else [(w, x, y), (b, torch.ones_like(y[..., :1]), y)]
        return y

    def lookup(self, index, table):
        y = table[index]
        y.retain_grad()
        self.uses.append((table, index, y))
        return y


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def expected_of(loss, params, batch, approximation, weights=None):
    """S and A by their definitions: one sample after the other, one term after the other."""
    size = len(batch[0])
    weights = torch.ones(size).double() if weights is None else weights
    params = {name: p.clone().requires_grad_() for name, p in params.items()}
    totals = {name: [0, 0, 0] for name in params}
    for weight, *sample in zip(weights, *batch, strict=True):
        tape = Tape()
        loss(params, *sample, tape).backward()
        for name, p in params.items():
            terms = []
            for q, x, y in tape.uses:
                if q is not p or y.grad is None:
                    continue
                grads = y.grad.reshape(-1, y.shape[-1])
                if x.dtype == torch.long:  # the rows of a table lie along the first axis
                    terms += zip(F.one_hot(x.reshape(-1), len(p)).double(), grads, strict=True)
                else:
                    terms += zip(grads, x.detach().reshape(-1, x.shape[-1]), strict=True)
            if approximation == "reduce":
                lefts, rights = zip(*terms, strict=True)
                terms, count = [(sum(lefts), sum(rights))], len(terms) ** 2
            else:
                count = len(terms)
            for left, right in terms:
                totals[name][0] += weight * torch.outer(left, left)
                totals[name][1] += weight * torch.outer(right, right)
            totals[name][2] += weight * count
    return {name: KroneckerFactor(a / n, s / weights.sum()) for name, (s, a, n) in totals.items()}


class Plain(NamedTuple):
    """The same products as the library sees them, in the spelling of a model."""

    linear: Callable = F.linear
    lookup: Callable = F.embedding


def mlp(p, x, y, layers):
    return F.cross_entropy(layers.linear(torch.tanh(layers.linear(x, p["w1"], p["b1"])), p["w2"], p["b2"]), y)


def recurrent(p, x_t, y, layers):
    h, total = x_t.new_zeros(3), 0
    for x in x_t:
        h = torch.tanh(layers.linear(x, p["w_ih"], p["b"]) + layers.linear(h, p["w_hh"]))
        total = total + (layers.linear(h, p["head"])[0] - y).square()
    return total


def tied(p, tokens, layers):
    x = layers.lookup(tokens, p["table"])
    x = x + layers.linear(torch.tanh(layers.linear(x, p["up"])), p["down"])
    return F.cross_entropy(layers.linear(x, p["table"])[:-1], tokens[1:], reduction="sum")


def scaled(p, x, y, layers):
    hidden = torch.tanh(layers.linear(x, p["w"]) * 0.5)
    return (layers.linear(hidden, p["v"])[..., 0].mean() - y).square()


def td(p, s_tm1, r_t, s_t, layers):
    def value(s):
        return layers.linear(torch.tanh(layers.linear(s, p["w"], p["b"])), p["v"])[0]

    return td_loss(value(s_tm1), r_t, 0.9, value(s_t))


def sizes(**shapes):
    return {name: draw(*shape, seed=place) / 2 for place, (name, shape) in enumerate(shapes.items())}


LABELS = torch.tensor([0, 2, 1, 1, 0])
MODELS = {
    "mlp": (mlp, sizes(w1=(4, 3), b1=(4,), w2=(3, 4), b2=(3,)), (draw(5, 3), LABELS)),
    "recurrent": (
        recurrent,
        sizes(w_ih=(3, 2), b=(3,), w_hh=(3, 3), head=(1, 3)),
        (draw(5, 4, 2), draw(5, seed=9)),
    ),
    "tied": (tied, sizes(table=(7, 4), up=(6, 4), down=(4, 6)), (torch.randint(7, (5, 4)),)),
    "scaled": (scaled, sizes(w=(4, 3), v=(1, 4)), (draw(5, 6, 3), draw(5, seed=9))),
    "td": (td, sizes(w=(4, 3), b=(4,), v=(1, 4)), (draw(5, 3), draw(5, seed=9), draw(5, 3, seed=7))),
}


@pytest.mark.parametrize("options", PATHS, ids=str)
@BOTH
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_loops_over_terms(name, approximation, options):
    loss, params, batch = MODELS[name]
    found, _ = per_sample_grads(
        lambda p, *sample: loss(p, *sample, Plain()),
        params,
        batch,
        (KroneckerFactors(approximation), ClippedMean(1.0)),
        **options,
    )
    assert_trees_close(found, expected_of(loss, params, batch, approximation), 1e-9)


@pytest.mark.parametrize("name", ["recurrent", "tied"])
@BOTH
def test_traced(name, approximation):
    loss, params, batch = MODELS[name]
    found = per_sample_grads(
        lambda p, *sample: loss(p, *sample, Plain()), params, batch, KroneckerFactors(approximation), engine="traced"
    )
    assert_trees_close(found, expected_of(loss, params, batch, approximation), 1e-9)


def plus(y, b):
    return y if b is None else y + b


SPELLINGS = {
    "matmul": lambda x, w, b=None: plus(x @ w.T, b),
    "einsum": lambda x, w, b=None: plus(torch.einsum("...i,oi->...o", x, w), b),
    "vector": lambda x, w, b=None: plus(torch.matmul(w, x[..., None]).squeeze(-1), b),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@BOTH
def test_spellings(spelling, approximation):
    loss, params, batch = MODELS["scaled"]
    plain = Plain(SPELLINGS[spelling])
    found = per_sample_grads(lambda p, *sample: loss(p, *sample, plain), params, batch, KroneckerFactors(approximation))
    assert_trees_close(found, expected_of(loss, params, batch, approximation), 1e-9)


@BOTH
def test_inputs_along_the_first_axis_have_the_same_product(approximation):
    loss, params, batch = MODELS["mlp"]
    expected = expected_of(loss, params, batch, approximation)
    turned = {name: p.T.contiguous() if p.ndim == 2 else p for name, p in params.items()}
    plain = Plain(lambda x, w, b=None: plus(x @ w, b))
    found = per_sample_grads(lambda p, *sample: loss(p, *sample, plain), turned, batch, KroneckerFactors(approximation))
    for name in ("w1", "w2"):
        assert_trees_close(
            torch.kron(found[name].A, found[name].S), torch.kron(expected[name].S, expected[name].A), 1e-9
        )


@BOTH
def test_weights_and_samples_of_weight_zero(approximation):
    loss, params, (x_t, y) = MODELS["recurrent"]
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0], dtype=torch.float64)
    expected = expected_of(loss, params, (x_t, y), approximation, weights)
    x_t = x_t.index_fill(0, torch.tensor([1]), torch.nan)
    found = per_sample_grads(
        lambda p, *sample: loss(p, *sample, Plain()), params, (x_t, y), KroneckerFactors(approximation), weights=weights
    )
    assert_trees_close(found, expected, 1e-9)


@pytest.mark.parametrize("chunk_size", [None, 2])
@BOTH
def test_units_have_the_terms_of_their_samples(approximation, chunk_size):
    loss, params, (x_t, y) = MODELS["recurrent"]
    users = [0, 1, 0, 0, 2]
    units = [[i for i, user in enumerate(users) if user == unit] for unit in range(3)]
    found = per_sample_grads(
        lambda p, *sample: loss(p, *sample, Plain()),
        params,
        (x_t, y),
        KroneckerFactors(approximation),
        unit=users,
        chunk_size=chunk_size,
    )

    def of_unit(p, unit, tape):
        return sum(loss(p, x_t[i], y[i], tape) for i in units[int(unit)])

    expected = expected_of(of_unit, params, (torch.arange(3),), approximation)
    assert_trees_close(found, expected, 1e-9)


@BOTH
def test_lookups_in_units_of_unequal_sizes(approximation):
    """Padding looks nothing up."""
    loss, params, (tokens,) = MODELS["tied"]
    table = {"table": params["table"], "w": draw(3, 4)}

    def lookups(p, tokens, layers):
        return torch.tanh(layers.linear(layers.lookup(tokens, p["table"]), p["w"])).sum()

    for function, given in ((loss, params), (lookups, table)):
        found = per_sample_grads(
            lambda p, *sample, function=function: function(p, *sample, Plain()),
            given,
            (tokens,),
            KroneckerFactors(approximation),
            unit=[0, 1, 0, 0, 2],
        )

        def of_unit(p, unit, tape, function=function):
            return sum(function(p, tokens[i], tape) for i in ([0, 2, 3], [1], [4])[int(unit)])

        expected = expected_of(of_unit, given, (torch.arange(3),), approximation)
        if function is lookups:
            expected["table"] = expected["table"]._replace(S=expected["table"].S.diagonal())
        assert_trees_close(found, expected, 1e-9)


def test_vectors_in_units_of_unequal_sizes_have_exact_blocks():
    params, x = {"scale": draw(3), "w": draw(4, 3, seed=1), "number": draw(1, seed=2)[0]}, draw(5, 6, 3)

    def loss(p, x):
        return torch.tanh(F.linear(x * p["scale"], p["w"])).sum() * p["number"]

    rows, found = per_sample_grads(loss, params, x, (ps.Stack(), KroneckerFactors()), unit=[0, 1, 0, 0, 2])
    for name in ("scale", "number"):
        g = rows[name].reshape(3, -1)
        assert_trees_close(found[name], KroneckerFactor(torch.ones(1, 1).double(), g.T @ g / 3), 1e-9)


@pytest.mark.parametrize("options", PATHS, ids=str)
def test_inputs_along_both_axes(options):
    """One input is the right operand of one layer and the left one of another: their divisors differ."""
    params, x = {"a": draw(4, 3), "b": draw(3, 2, seed=1)}, draw(5, 6, 3)

    def loss(p, x):
        return torch.tanh(F.linear(x, p["a"])).sum() + torch.tanh(x @ p["b"]).sum()

    found = per_sample_grads(loss, params, x, KroneckerFactors(), **options)
    moment = torch.einsum("bti,btj->ij", x, x) / 5
    assert_trees_close(found["a"].A, moment / 6, 1e-9)
    signals = 1 - torch.tanh(x @ params["b"]).square()
    expected = torch.kron(moment, torch.einsum("bto,btp->op", signals, signals) / 30)
    assert_trees_close(torch.kron(found["b"].S, found["b"].A), expected, 1e-9)


def test_samples_that_use_a_layer_unlike_others_are_rejected():
    x, steps = draw(5, 4, 3), torch.tensor([1, 2, 3, 1, 2])

    def loss(w, x, steps):
        return sum(torch.tanh(F.linear(x[i], w)).sum() for i in range(4) if i < steps)

    def branch(p, x, steps):
        return torch.tanh(F.linear(x[0], p["b" if steps > 1 else "a"])).sum()

    with pytest.raises(ps.LossError, match=r"as often .* received terms: 1 of Outer and 2 of Outer and 3 of Outer"):
        per_sample_grads(loss, draw(2, 3), (x, steps), KroneckerFactors(), engine="loop")
    params = {"a": draw(2, 3), "b": draw(2, 3)}
    for size, match in ((None, r"every sample to use params\['a'\] in one way"), (1, "like those of earlier batches")):
        with pytest.raises(ps.LossError, match=match):
            per_sample_grads(branch, params, (x, steps), KroneckerFactors(), engine="loop", chunk_size=size)


@BOTH
def test_streams_and_no_samples(approximation):
    loss, params, batch = MODELS["tied"]
    parts = [tuple(x[rows] for x in batch) for rows in (slice(0), slice(0, 3), slice(3, 3), slice(3, 5))]

    def one(p, *sample):
        return loss(p, *sample, Plain())

    found = ps.accumulate(one, params, parts, KroneckerFactors(approximation))
    assert_trees_close(found, expected_of(loss, params, batch, approximation), 1e-9)


@pytest.mark.parametrize("engine", ["eager", "loop", "traced"])
@BOTH
def test_several_outputs_add_up(approximation, engine):
    """S adds up over outputs, and A is what they share: the Gauss-Newton matrix, output by output."""
    _, params, (tokens,) = MODELS["tied"]

    def outputs(p, tokens, layers):
        x = layers.lookup(tokens, p["table"])
        x = torch.tanh(layers.linear(torch.tanh(layers.linear(x, p["up"])), p["down"]))
        return x.sum(0)

    found = per_sample_grads(
        lambda p, tokens: outputs(p, tokens, Plain()),
        params,
        tokens,
        KroneckerFactors(approximation),
        outputs="rows",
        engine=engine,
    )
    each = [expected_of(lambda *args, k=k: outputs(*args)[k], params, (tokens,), approximation) for k in range(4)]
    for name in ("up", "down"):
        assert_trees_close(found[name].A, each[0][name].A, 1e-9)
        assert_trees_close(found[name].S, sum(one[name].S for one in each), 1e-9)
    table = [torch.kron(one["table"].S, one["table"].A) for one in each]
    if approximation == "expand":
        assert_trees_close(torch.kron(found["table"].S.diag(), found["table"].A), sum(table), 1e-9)


def convolution(groups, transposed):
    kind = nn.ConvTranspose1d if transposed else nn.Conv1d
    torch.manual_seed(0)
    return kind(4, 6, 3, stride=2, padding=1, groups=groups).double()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@BOTH
def test_convolutions(approximation, groups, transposed):
    """A convolution of one group, or each of its groups, is a product with patches."""
    net, x = convolution(groups, transposed), draw(5, 4, 9)

    def loss(net, x):
        return torch.tanh(net(x)).square().sum()

    found = per_sample_grads(loss, net, x, KroneckerFactors(approximation))
    total = 0
    for image in x:
        y = net(image)
        (signal,) = torch.autograd.grad(torch.tanh(y).square().sum(), y)
        inputs, outputs = (signal, image) if transposed else (image, signal)
        patches = F.pad(inputs, (1, 1)).unfold(1, 3, 2)[:, : outputs.shape[1]]  # [C, T, 3]
        right = patches.unflatten(0, (groups, -1)).transpose(1, 2).flatten(2)  # [G, T, C/G · 3]
        left = outputs.unflatten(0, (groups, -1)).mT  # [G, T, O/G]
        terms = right.shape[1]
        if approximation == "reduce":
            left, right = left.sum(1, keepdim=True), right.sum(1, keepdim=True) / terms**0.5
        moments = [left.mT @ left, right.mT @ right / terms]
        total = [a + b for a, b in zip(total, moments, strict=True)] if total else moments
    s, a = (z.squeeze(0) / 5 for z in total)
    assert_trees_close(found["weight"], KroneckerFactor(a, s), 1e-9)
    assert found["bias"].S.shape == (6, 6)


def test_a_gated_recurrent_network_sums_over_its_steps():
    torch.manual_seed(0)
    net, x = nn.GRU(3, 2, batch_first=True).double(), draw(5, 4, 3)

    def loss(net, x):
        return net(x)[0].square().sum()

    found = per_sample_grads(loss, net, x, KroneckerFactors())
    assert_trees_close(found["weight_ih_l0"].A, torch.einsum("bti,btj->ij", x, x) / 20, 1e-9)
    states = F.pad(net(x)[0].detach()[:, :-1], (0, 0, 1, 0))
    assert_trees_close(found["weight_hh_l0"].A, torch.einsum("bti,btj->ij", states, states) / 20, 1e-9)
    gradients = per_sample_grads(loss, net, x[:, :1], (ps.Stack(), KroneckerFactors()))  # of one step: no approximation
    for name, rows in gradients[0].items():
        factor, flat = gradients[1][name], rows.flatten(1)
        if name != "weight_hh_l0":
            one = torch.trace(factor.S) * torch.trace(factor.A) if name.startswith("bias") else torch.trace(factor.S)
            expected = flat.square().sum(1) / (x[:, 0].square().sum(1) if name == "weight_ih_l0" else 1)
            assert_trees_close(one, expected.mean(), 1e-9)


@pytest.mark.parametrize("engine", ["eager", "loop", "traced"])
def test_diagonals_where_nothing_is_a_product(engine):
    params = {"masked": draw(4, 3), "scale": draw(4, seed=1), "number": draw(1, seed=2)[0]}
    mask = (draw(4, 3, seed=3) > 0).double()

    def loss(p, x):
        return (p["scale"] * torch.tanh(F.linear(x, p["masked"] * mask))).sum() * p["number"]

    x = draw(5, 3)
    rows, found = per_sample_grads(loss, params, x, (ps.Stack(), KroneckerFactors()), engine=engine)
    assert_trees_close(found["masked"], rows["masked"].square().mean(0), 1e-9)
    assert_trees_close(found["scale"].S, rows["scale"].T @ rows["scale"] / 5, 1e-9)
    assert_trees_close(found["number"].S, rows["number"].square().mean().view(1, 1), 1e-9)
    named = {row.path: row.factor for row in ps.explain(loss, params, x, KroneckerFactors()).rows}
    assert named == dict.fromkeys(("params['masked']", "params['scale']", "params['number']"), "Dense")


def test_a_complex_parameter_has_a_diagonal():
    w, x = torch.randn(3, dtype=torch.complex128), draw(5, 3)
    rows, found = per_sample_grads(lambda w, x: (w * x).abs().sum(), w, x, (ps.Stack(), KroneckerFactors()))
    squares = torch.complex(rows.real.square().mean(0), rows.imag.square().mean(0))
    assert_trees_close(found, squares, 1e-9)


@BOTH
def test_long_axes_have_diagonals(approximation):
    loss, params, batch = MODELS["tied"]
    expected = expected_of(loss, params, batch, approximation)
    found = per_sample_grads(
        lambda p, *sample: loss(p, *sample, Plain()), params, batch, KroneckerFactors(approximation, max_size=5)
    )
    for name, factor in expected.items():
        for one, other in zip(found[name], factor, strict=True):
            assert_trees_close(one, other.diagonal() if len(other) > 5 else other, 1e-9)


def test_bad_arguments():
    with pytest.raises(ps.ArgumentError, match="approximation: expected 'expand' or 'reduce', received 'exact'"):
        KroneckerFactors("exact")
    for size in (0, 2.0, True):
        with pytest.raises(ps.ArgumentError, match="max_size: expected a positive int"):
            KroneckerFactors(max_size=size)


class Pooled(nn.Module):
    """A model of sequences, whose loss is one number for each."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x))).mean(1)


THEIRS = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 3)), (8, 3)),
    "shared": (Pooled, (8, 5, 3)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)),
        (8, 2, 6, 6),
    ),
}


@pytest.mark.parametrize("kind", ["empirical", "type-2"])
@pytest.mark.parametrize("name", THEIRS)
@BOTH
def test_agrees_with_curvlinops(name, approximation, kind):
    from curvlinops import KFACLinearOperator

    make, shape = THEIRS[name]
    torch.manual_seed(0)
    model, x, labels = make().double(), draw(*shape), torch.randint(3, (8,))
    params = dict(model.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = KFACLinearOperator(
            model, nn.CrossEntropyLoss(), [*params.values()], [(x, labels)], fisher_type=kind, kfac_approx=approximation
        )
        vectors = {name: draw(*p.shape, seed=place) for place, (name, p) in enumerate(params.items())}
        product = theirs @ torch.cat([v.flatten() for v in vectors.values()])

    def loss(model, x, label):
        return F.cross_entropy(model(x[None])[0], label)

    def columns(model, x, _):
        """Rᵀf for the root R of the Hessian diag(p) − p pᵀ = R Rᵀ of the cross-entropy."""
        logits = model(x[None])[0]
        p = logits.softmax(0).detach()
        return p.sqrt() * (logits - (p * logits).sum())

    of_rows = {} if kind == "empirical" else {"outputs": "rows"}
    function = columns if of_rows else loss
    factors = per_sample_grads(function, model, (x, labels), KroneckerFactors(approximation), **of_rows)
    for layer, s in theirs._gradient_covariances.items():
        assert_trees_close(factors[f"{layer}.weight"].S, s.detach(), 1e-9)
        assert_trees_close(factors[f"{layer}.bias"].S, s.detach(), 1e-9)
        assert_trees_close(factors[f"{layer}.weight"].A, theirs._input_covariances[layer].detach(), 1e-9)
    found = ps.Curvature(factors).matvec(vectors)
    assert_trees_close(torch.cat([v.flatten() for v in found.values()]), product.detach(), 1e-9)
