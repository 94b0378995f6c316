"""Linear systems in the Fisher matrix: what the grid does not show."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from counting import Operations, operations
from grid import natural
from oracle import Rows, assert_trees_close, oracle, reals
from seams import blocks_of
from torch import nn
from torch.nn import functional as F
from workloads import build

import persample as ps
from persample import ArgumentError, Leverage, LossError, NaturalGradient, fisher_vector_product, per_sample_grads
from persample.factors import Dense
from persample.factors.linear_system import float64_gram, solve

ENGINES = pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"engine": "loop"}, {"engine": "traced"}], ids=str)
NAN = float("nan")
F64 = torch.float64


def matrix(tree):
    """All gradients as one matrix [B, P]."""
    return torch.cat([x.flatten(1) for x in torch.utils._pytree.tree_leaves(tree)], 1)


def vector(tree):
    return torch.cat([x.flatten() for x in torch.utils._pytree.tree_leaves(tree)])


def linear(w, x):
    """The gradient of a sample is x itself."""
    return w @ x


def with_aux(w, x, v):
    return w @ x, {"v": (v,)}


def read(aux):
    return 2 * aux["v"][0]


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@ENGINES
def test_weights_count_samples_and_remove_nan(options):
    work = build("mlp_td")
    rows = oracle(work.loss_fn, work.params, work.batch)
    kept = torch.tensor([0, 2, 2, 3])  # what the weights 1, 0, 2, 1, 0 mean
    repeated = Rows([g[kept] for g in rows.grads], rows.losses[kept], rows.structure)
    batch, v, weights = [x.clone() for x in work.batch], draw(5), torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0])
    batch[0][1] = v[1] = NAN
    wanted = {
        "plain": ps.NaturalGradient(0.5, v),
        "centered": ps.NaturalGradient(0.5, v, centered=True),
        "leverage": ps.Leverage(0.5),
    }
    got = per_sample_grads(work.loss_fn, work.params, tuple(batch), wanted, weights=weights, **options)
    for name, centered in (("plain", False), ("centered", True)):
        expected = natural(repeated, v[kept], strength=0.5, centered=centered)
        assert_trees_close(got[name], expected, 1e-8)
    g, counted = reals(rows), reals(repeated)
    fisher = counted.T @ counted / 4 + 0.5 * torch.eye(g.shape[1], dtype=g.dtype)
    expected = (g.T * torch.linalg.solve(fisher, g.T)).sum(0) / 4
    seen = torch.tensor([0, 2, 3, 4])  # the last has weight 0: it is scored, and counts for nothing
    assert_trees_close(got["leverage"][seen], expected[seen], 1e-8)
    assert got["leverage"][1].isnan()


@ENGINES
def test_targets_are_read_from_aux(options):
    w, x, v = draw(3), draw(5, 3), draw(5, seed=1)
    expected = per_sample_grads(linear, w, x, ps.NaturalGradient(0.1, 2 * v))
    assert_trees_close(per_sample_grads(with_aux, w, (x, v), ps.NaturalGradient(0.1, read), **options), expected, 1e-12)


@ENGINES
def test_without_damping_the_solution_has_minimum_norm(options):
    """Of Σ (⟨gᵢ, u⟩ − vᵢ)²: with more samples than parameters, with fewer, and with a sample twice."""
    for x in (draw(7, 3), draw(3, 7), draw(3, 7)[[0, 1, 2, 2, 2]]):
        w, v = draw(x.shape[1]), draw(len(x), seed=1)
        wanted = ps.NaturalGradient(0.0, v), ps.Leverage(0.0), ps.NaturalGradient(torch.tensor(0.0), v)
        got = per_sample_grads(linear, w, x, wanted, **options)
        assert_trees_close(got[0], torch.linalg.pinv(x) @ v, 1e-8)  # condition number of the Gram matrix: below 100
        assert_trees_close(got[1], (x @ torch.linalg.pinv(x)).diagonal(), 1e-8)
        assert torch.equal(got[0], got[2])


@ENGINES
def test_no_damping_of_an_ill_conditioned_matrix_warns(options):
    x, v = torch.diag(torch.tensor([1.0, 1e-5])).double(), torch.ones(2, dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match=r"damping: .*counts as 0 .*condition number 1e\+10.*larger damping"):
        got = per_sample_grads(linear, draw(2), x, ps.NaturalGradient(0.0, v), **options)
    assert_trees_close(got, torch.tensor([1.0, 1e5]).double(), 1e-4)


def test_a_damping_below_rounding_errors_counts_as_0():
    x = torch.tensor([[3.0, 4.0], [3.0, 4.0], [4.0, -3.0]], dtype=torch.float64) * 1e4
    v = torch.tensor([1.0, 3.0, 5.0], dtype=torch.float64)
    for damping in (1e-12, 0.0):
        got = per_sample_grads(linear, draw(2), x, (ps.NaturalGradient(damping, v), ps.Leverage(damping)))
        assert_trees_close(got[0], torch.linalg.pinv(x) @ v, 1e-8)
        assert_trees_close(got[1], torch.tensor([0.5, 0.5, 1.0]).double(), 1e-8)


@pytest.mark.parametrize("decades", [2, 4, 6])
def test_the_error_grows_with_the_condition_number(decades):
    """As documented: about eps · κ for κ = ‖F + λI‖ / λ, in float32."""
    work = build("mlp_td", torch.float32)
    rows = oracle(work.loss_fn, work.params, work.batch)
    g, v = reals(rows), draw(5)
    strength = float(torch.linalg.eigvalsh(g @ g.T / 5)[-1]) / 10**decades
    got = per_sample_grads(work.loss_fn, work.params, work.batch, ps.NaturalGradient(strength, v.float()))
    assert_trees_close(got, natural(rows, v.float().double(), strength=strength), 10 * 1.2e-7 * 10**decades)


def test_of_more_samples_than_parameters_the_part_of_the_targets_that_no_update_fits_cancels():
    """In float32 its rounding errors, divided by λ, would be as large as the result."""
    x, v = draw(200, 3).float(), draw(200, seed=1).float()
    got = per_sample_grads(linear, torch.zeros(3), x, ps.NaturalGradient(1e-6, v))
    fisher = x.double().T @ x.double() / 200 + 1e-6 * torch.eye(3).double()
    assert_trees_close(got, torch.linalg.solve(fisher, x.double().T @ v.double() / 200), 1e-6)


@pytest.mark.parametrize("engine", ["eager", "traced"])
@pytest.mark.parametrize("first_is_weighted", [True, False])
def test_of_batches_some_may_have_weights(engine, first_is_weighted):
    work, v = build("mlp_td"), draw(10)
    weights, counted = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0]), [0, 2, 2, 3]
    kept = [*counted, *range(5, 10)] if first_is_weighted else [*range(5), *(5 + i for i in counted)]
    rows = oracle(work.loss_fn, work.params, tuple(torch.cat([x, x])[kept] for x in work.batch))
    got = ps.accumulate(
        work.loss_fn,
        work.params,
        [work.batch, work.batch],
        ps.NaturalGradient(0.1, v),
        weights=[weights, None] if first_is_weighted else [None, weights],
        engine=engine,
    )
    assert_trees_close(got, natural(rows, v[kept], strength=0.1), 1e-9)


@pytest.mark.parametrize(("weights", "is_scaled"), [(None, False), (torch.ones(5), True)])
def test_the_gram_matrix_is_scaled_for_weights_alone(weights, is_scaled):
    work = build("mlp_td")
    counted = operations(
        lambda: per_sample_grads(work.loss_fn, work.params, work.batch, ps.NaturalGradient(1.0), weights=weights)
    )
    assert (((5, 1), (5,)) in counted.shapes["mul"]) == is_scaled  # sᵢ sⱼ


def test_a_bias_shares_the_product_of_its_signals():
    work = build("mlp_td")
    counted = operations(lambda: per_sample_grads(work.loss_fn, work.params, work.batch, ps.Leverage(1.0)))
    products = [pair for pair in counted.shapes["mm"] if pair[0] == pair[1][::-1] and len(work.batch[0]) == pair[0][0]]
    assert len(products) == 4  # the signals and inputs of two layers


def test_products_are_shared_by_the_same_memory_only():
    values = draw(4, 6)
    halves = [Dense(values[:, :3]), Dense(values[:, 3:])]
    assert_trees_close(float64_gram(halves), values @ values.T, 1e-12)


@pytest.mark.parametrize("matrices", [0, 1, 2])
def test_biases_that_share_their_signals_count_each(matrices):
    x = draw(5, 4)
    w = {"a": draw(3), "b": draw(3, seed=1), **{f"matrix{i}": draw(4, 3, seed=2 + i) for i in range(matrices)}}

    def loss(w, x):
        return torch.tanh(sum((x @ w[f"matrix{i}"] for i in range(matrices)), w["a"] + w["b"] + x.sum())).sum()

    factors = list(per_sample_grads(loss, w, x, ps.Factored()).values())
    rows = reals(oracle(loss, w, (x,)))
    assert_trees_close(float64_gram(factors), rows @ rows.T, 1e-12)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 150])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_gram_matrix_is_computed_by_blocks(size, dtype):
    """Of a layer with its bias, one with a single output, and one without a factor."""
    factors, expected, s = gram_of_blocks(size, dtype)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    assert_trees_close(float64_gram(factors, s), expected, bound)
    assert_trees_close(float64_gram(factors, s, lower=True).tril(), expected.tril(), bound)


def gram_of_blocks(size, dtype):
    w = {"hidden": draw(4, 3), "bias": draw(3), "out": draw(3), "scale": draw(2)}
    x, w = draw(size, 4).to(dtype), {name: value.to(dtype) for name, value in w.items()}

    def loss(w, x):
        return torch.tanh(x @ w["hidden"] + w["bias"]) @ w["out"] * w["scale"].prod()

    rows = reals(oracle(loss, w, (x,))).double()
    s = draw(size, seed=1)
    return list(per_sample_grads(loss, w, x, ps.Factored()).values()), s[:, None] * (rows @ rows.T) * s, s


def test_large_operands_are_converted_a_few_columns_at_a_time(monkeypatch):
    factors, _, _ = gram_of_blocks(65, torch.float32)
    whole = float64_gram(factors)
    blocks_of(monkeypatch, 2)
    with Operations() as mode:
        assert_trees_close(float64_gram(factors), whole, 1e-12)
    largest = max(shape[-1] for (shape,) in mode.shapes["_to_copy"] if len(shape) == 2)
    assert largest < 4


@ENGINES
def test_one_sample(options):
    x = draw(1, 4)
    got = per_sample_grads(linear, draw(4), x, (ps.NaturalGradient(0.5), ps.Leverage(0.5)), **options)
    norm = x.square().sum()
    assert_trees_close(got, (x[0] / (norm + 0.5), (norm / (norm + 0.5))[None]), 1e-12)


@ENGINES
def test_zero_gradients(options):
    x = torch.zeros(3, 2, dtype=torch.float64)
    wanted = [*(make(d) for d in (0.0, 1.0) for make in (ps.NaturalGradient, ps.Leverage))]
    for result in per_sample_grads(linear, draw(2), x, wanted, **options):
        assert not result.any()


def last(value):
    """Return samples of which the last is a pivot of its own, which no factorization reports."""
    return torch.tensor([[1, 0], [2, 0], [0, value]], dtype=torch.float64)


# A number of the second sample is NaN; the last is not finite, or its square overflows.
ROTTEN = [draw(3, 2).masked_fill(torch.arange(6).view(3, 2) == 2, NAN), last(NAN), last(float("inf")), last(1e200)]


@pytest.mark.parametrize("x", ROTTEN, ids=["second", "last", "infinite", "overflow"])
@pytest.mark.parametrize("damping", [0.0, 0.5])
@ENGINES
def test_nan_reaches_every_number(options, damping, x):
    wanted = ps.NaturalGradient(damping), ps.Leverage(damping)
    for result in per_sample_grads(linear, draw(2), x, wanted, **options):
        assert result.isnan().all()


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_float32_gradients_of_any_size(scale):
    """Neither their squares nor the coefficients of the sum need fit into float32."""
    x = draw(3, 5).float() * scale
    got = per_sample_grads(linear, torch.zeros(5), x, (ps.NaturalGradient(0.1 * scale**2), ps.Leverage(0.1 * scale**2)))
    plain = per_sample_grads(linear, draw(5), x.double() / scale, (ps.NaturalGradient(0.1), ps.Leverage(0.1)))
    assert_trees_close((got[0].double() * scale, got[1].double()), plain, 1e-5)


@ENGINES
def test_results_are_written_into_out(options):
    w, x = draw(3), draw(5, 3)
    wanted = {"natural": ps.NaturalGradient(0.5), "leverage": ps.Leverage(0.5)}
    first = per_sample_grads(linear, w, x, wanted, **options)
    again = per_sample_grads(linear, w, 2 * x, wanted, out=first, **options)
    assert again is first
    assert_trees_close(again, per_sample_grads(linear, w, 2 * x, wanted), 1e-12)


def test_damping_and_targets_change_without_a_new_program():
    def loss(w, x):
        return (w @ x) ** 2

    w, x = draw(3), draw(5, 3)
    for damping, seed in itertools.product((0.1, torch.tensor(2.0).double()), (1, 2)):
        wanted = ps.NaturalGradient(damping, draw(5, seed=seed)), ps.Leverage(damping)
        got = per_sample_grads(loss, w, x, wanted, engine="traced")
        assert_trees_close(got, per_sample_grads(loss, w, x, wanted), 1e-10)
    assert len(ps.explain(loss, w, x, engine="traced").compilations) == 1
    per_sample_grads(loss, w, x, (ps.NaturalGradient(0.0), ps.Leverage(0.0)), engine="traced")
    assert len(ps.explain(loss, w, x, engine="traced").compilations) == 2


def test_one_program_for_all_batch_sizes():
    def loss(w, x):
        return (w @ x) ** 2

    w = draw(3)
    for size in (4, 7, 9, 12):
        x, v = draw(size, 3), draw(size, seed=1)
        wanted = ps.NaturalGradient(0.1, v), ps.Gram(per_sample_grads(linear, w, draw(2, 3), ps.Factored()))
        got = per_sample_grads(loss, w, x, wanted, engine="traced")
        assert_trees_close(got, per_sample_grads(loss, w, x, wanted), 1e-10)
    assert [c.batch_size for c in ps.explain(loss, w, x, engine="traced").compilations] == [4, None]


@pytest.mark.parametrize("size", [5, 70])
@pytest.mark.parametrize("reduce", [ps.NaturalGradient(0.1), ps.Leverage(0.1), ps.NaturalGradient(0.0)], ids=repr)
def test_under_the_callers_vmap(reduce, size):
    w, x = draw(2, 3), draw(size, 3, seed=1)

    def loss(w, x):
        return torch.tanh(w @ x)

    found = torch.func.vmap(lambda w: per_sample_grads(loss, w, x, reduce))(w)
    for row, each in zip(found, w, strict=True):
        assert_trees_close(row, per_sample_grads(loss, each, x, reduce), 1e-9)


@pytest.mark.parametrize("engine", ["eager", "traced", "loop"])
@pytest.mark.parametrize("workload", ["cnn_group_norm", "tied_weights", "complex_params"])
def test_gram_of_two_losses(workload, engine):
    """Of factors against factors."""
    work = build(workload)

    def other_loss(params, *sample):
        return work.loss_fn(params, *sample).exp()

    test = tuple(x.flip(0)[:3] for x in work.batch)
    rows, others = oracle(work.loss_fn, work.params, work.batch), oracle(other_loss, work.params, test)
    factors = per_sample_grads(other_loss, work.params, test, ps.Factored())
    wanted = ps.Gram(factors), ps.CosineSimilarity(factors)
    gram, cosines = per_sample_grads(work.loss_fn, work.params, work.batch, wanted, engine=engine)
    expected = reals(rows) @ reals(others).T
    assert_trees_close(gram, expected, 1e-9)
    assert_trees_close(cosines, expected / (reals(rows).norm(dim=1)[:, None] * reals(others).norm(dim=1)), 1e-9)


def test_other_factors_need_no_new_program():
    def loss(w, x):
        return (w @ x) ** 3

    w, x = draw(3), draw(5, 3)
    for seed in range(3):
        factors = per_sample_grads(linear, w, draw(2, 3, seed=seed), ps.Factored())
        got = per_sample_grads(loss, w, x, ps.Gram(factors), engine="traced")
        assert_trees_close(got, per_sample_grads(loss, w, x, ps.Gram(factors)), 1e-12)
    assert len(ps.explain(loss, w, x, engine="traced").compilations) == 1


def mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(8, 4)


def cnn():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)), torch.randn(8, 1, 6, 6)


@pytest.mark.parametrize("make", [mlp, cnn])
@pytest.mark.parametrize("options", [{}, {"chunk_size": 3}, {"engine": "loop"}], ids=str)
def test_products_agree_with_curvlinops(make, options):
    from curvlinops import EFLinearOperator

    torch.manual_seed(0)
    model, x = (y.double() for y in make())
    y = torch.randint(3, (8,))
    named = dict(model.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = EFLinearOperator(model, nn.CrossEntropyLoss(), list(named.values()), [(x, y)])
        v = {name: torch.randn(2, *p.shape, dtype=torch.float64) for name, p in named.items()}
        columns = torch.cat([z.flatten(1) for z in v.values()], 1)
        expected = torch.stack([theirs @ column for column in columns])

    def loss(model, x, y):
        return F.cross_entropy(model(x[None])[0], y)

    assert_trees_close(matrix(fisher_vector_product(loss, model, (x, y), v, **options)), expected.detach(), 1e-9)
    one = {name: z[0] for name, z in v.items()}
    assert_trees_close(vector(fisher_vector_product(loss, model, (x, y), one, **options)), expected[0].detach(), 1e-9)


def test_weighted_products():
    x, v, weights = draw(4, 3), draw(3, seed=1), torch.tensor([1.0, 0.0, 2.0, 0.5], dtype=torch.float64)
    expected = x.T @ (weights * (x @ v)) / 3.5
    x[1] = NAN
    assert_trees_close(fisher_vector_product(linear, draw(3), x, v, weights=weights), expected, 1e-12)


def test_a_system_is_solved():
    a = draw(5, 5)
    a, b = a @ a.T, draw(5, 2, seed=1)
    damping = torch.tensor(0.3, dtype=torch.float64)
    got, _ = solve(a.clone(), damping, b, eps=1e-16, minimum_norm=False)
    assert_trees_close(got, torch.linalg.solve(a + 0.3 * torch.eye(5, dtype=a.dtype), b), 1e-10)


@pytest.mark.parametrize("make", [ps.NaturalGradient, ps.Leverage])
@pytest.mark.parametrize("damping", [-1.0, NAN, float("inf"), "1", None, torch.ones(2)], ids=repr)
def test_no_damping(make, damping):
    with pytest.raises(ArgumentError, match=r"damping: expected a finite number >= 0, received .*Pass λ"):
        make(damping)


@pytest.mark.parametrize("numbers", [list, tuple, torch.Tensor.numpy], ids=["list", "tuple", "array"])
def test_targets_are_numbers(numbers):
    w, x = torch.randn(3, dtype=F64), torch.randn(5, 3, dtype=F64)
    targets = torch.randn(5, dtype=F64)
    given = targets.numpy() if numbers is torch.Tensor.numpy else numbers(targets.tolist())
    found, expected = (
        per_sample_grads(lambda w, x: (w @ x).tanh(), w, x, ps.NaturalGradient(0.1, t)) for t in (given, targets)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("targets", "expected", "received"),
    [
        (["1.0"], r"a real tensor \[B\]", r"\['1.0'\]"),
        ([[[1.0, 2.0]]], r"a real tensor \[B\]", r"shape \[1, 1, 2\], torch.float64"),
        (torch.ones(2, 2, 2), r"a real tensor \[B\]", r"shape \[2, 2, 2\]"),
        (torch.ones(2, dtype=torch.complex64), r"a real tensor \[B\]", r"shape \[2\], torch.complex64"),
    ],
)
def test_no_targets(targets, expected, received):
    with pytest.raises(ArgumentError, match=f"targets: expected {expected}.*received {received}"):
        ps.NaturalGradient(1.0, targets)


@pytest.mark.parametrize("engine", ["eager", "traced", "loop"])
def test_targets_that_do_not_fit(engine):
    w, x = draw(3), draw(5, 3)
    with pytest.raises(ArgumentError, match=r"targets: expected shape \[5\], received shape \[4\]"):
        per_sample_grads(linear, w, x, ps.NaturalGradient(1.0, draw(4)), engine=engine)
    with pytest.raises(LossError, match=r"NaturalGradient\(targets\): expected loss_fn to return \(loss, aux\)"):
        per_sample_grads(linear, w, x, ps.NaturalGradient(1.0, read), engine=engine)
    with pytest.raises(ArgumentError, match=r"targets: expected a function that returns one real number, .*\[5, 3\]"):
        per_sample_grads(with_aux, w, (x, x), ps.NaturalGradient(1.0, read), engine=engine)


@pytest.mark.parametrize("reduce", [ps.NaturalGradient(1.0), ps.Leverage(1.0)], ids=repr)
def test_what_is_no_average(reduce):
    name = type(reduce).__name__
    with pytest.raises(ArgumentError, match=rf"{name}\(\): expected samples .*received B = 0"):
        per_sample_grads(linear, draw(3), draw(0, 3), reduce)
    with pytest.raises(ArgumentError, match=rf"{name}\(\): expected samples .*the smallest -1"):
        per_sample_grads(linear, draw(3), draw(2, 3), reduce, weights=[-1.0, 2.0])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.ones(2, 3), r"expected a factor for params, received Tensor"),
        ({"w": Dense(torch.ones(2, 3))}, "expected a factor for params, received dict"),
        (Dense(torch.ones(2, 4)), r"expected shape \[3\] for params, received shape \[4\]"),
    ],
)
def test_no_gradients_of_another_batch(other, message):
    for make in (ps.Gram, ps.CosineSimilarity):
        with pytest.raises(ArgumentError, match=rf"{make.__name__}\(other\): {message}.*Factored"):
            per_sample_grads(linear, draw(3), draw(2, 3), make(other))
    with pytest.raises(ArgumentError, match=r"Gram\(other\): expected the structure"):
        per_sample_grads(lambda p, x: p["w"] @ x, {"w": draw(3)}, draw(2, 3), ps.Gram([Dense(torch.ones(2, 3))]))


@pytest.mark.parametrize(
    ("v", "message"),
    [
        (torch.ones(4), r"v: expected shape \[3\] for params, received shape \[4\]"),
        (torch.ones(2, 4), r"v: expected shape \[2, 3\] for params, received shape \[2, 4\]"),
        ({"w": torch.ones(3)}, "v: expected a tensor for params, received dict"),
        (np.ones(3), "v: expected a tensor for params, received ndarray"),
    ],
)
def test_no_vectors(v, message):
    with pytest.raises(ArgumentError, match=f"{message}.*stacked on a new axis 0"):
        fisher_vector_product(linear, draw(3), draw(2, 3), v)


@pytest.mark.parametrize("damping", [1e-3, 1e-6, 1e-8])
@pytest.mark.parametrize("weighted", [False, True])
def test_centered_systems_with_a_small_damping(damping, weighted):
    generator = torch.Generator().manual_seed(1)
    x, targets = (torch.randn(*shape, dtype=F64, generator=generator) for shape in ((60, 3), (60,)))
    x, weights = x + 1, torch.rand(60, dtype=F64, generator=generator) if weighted else torch.ones(60, dtype=F64)
    found = per_sample_grads(
        lambda w, x: w @ x,
        torch.zeros(3, dtype=F64),
        x,
        NaturalGradient(damping, targets, centered=True),
        weights=weights,
    )
    share = weights / weights.sum()
    rows, wanted = x - share @ x, targets - share @ targets
    fisher = (rows.T * share) @ rows + damping * torch.eye(3, dtype=F64)
    expected = torch.linalg.solve(fisher, (rows.T * share) @ wanted)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14 / damping * expected.norm().item())


def test_centered_gradients_without_spread_have_no_direction():
    x = torch.tensor([0.3, -1.7, 2.1], dtype=F64).expand(3, 3)
    reduction = NaturalGradient(0.0, torch.tensor([1.0, 2.0, 3.0], dtype=F64), centered=True)
    weights = torch.tensor([0.3, 0.6, 0.9], dtype=F64)
    found = per_sample_grads(lambda w, x: w @ x, torch.zeros(3, dtype=F64), x, reduction, weights=weights)
    assert found.abs().max() < 1e-9


def test_leverage_with_a_small_damping():
    x = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    x[0] *= 1e4
    found = per_sample_grads(lambda w, x: w @ x, torch.zeros(5), x, Leverage(1e-6))
    expected = per_sample_grads(lambda w, x: w @ x, torch.zeros(5, dtype=F64), x.double(), Leverage(0.0))
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("damping", [True, torch.tensor(0.1 + 0j)])
def test_a_damping_is_a_real_number(damping):
    with pytest.raises(ArgumentError, match="damping: expected a finite number"):
        NaturalGradient(damping)


def test_a_function_of_the_targets_may_return_a_number():
    def loss(w, x):
        return w @ x, x

    w, x = torch.zeros(2, dtype=F64), torch.randn(4, 2, dtype=F64)
    found, expected = (per_sample_grads(loss, w, x, NaturalGradient(0.1, t)) for t in (lambda _: 1.0, None))
    torch.testing.assert_close(found, expected)


def test_no_vector_is_refused():
    with pytest.raises(ArgumentError, match="v: expected one vector or more, received none"):
        fisher_vector_product(lambda w, x: w @ x, torch.zeros(2), torch.eye(2), torch.empty(0, 2))


def spring(rows, v, kept, *, weights, strength, centered=False):
    """The minimum of (1/n) Σ wᵢ (⟨gᵢ, u⟩ − vᵢ)² + λ ‖u − kept‖², by least squares in the space of parameters."""
    g, n = reals(rows), weights.sum()
    if centered:
        g, v = g - weights @ g / n, v - weights @ v / n
    root = (weights / n).sqrt()
    left = torch.cat([root[:, None] * g, strength**0.5 * torch.eye(g.shape[1], dtype=F64)])
    return torch.linalg.lstsq(left, torch.cat([root * v, strength**0.5 * kept])[:, None]).solution[:, 0]


@ENGINES
@pytest.mark.parametrize("centered", [False, True])
def test_previous_results_are_kept_where_a_batch_shows_nothing(options, centered):
    work, v, weights = build("mlp_td"), draw(5), torch.tensor([1.0, 0.5, 2.0, 1.0, 0.0]).double()
    rows, previous = oracle(work.loss_fn, work.params, work.batch), None
    kept = torch.zeros(reals(rows).shape[1], dtype=F64)
    for momentum in (0.5, torch.tensor(1.0).double(), 0.9):
        wanted = NaturalGradient(0.3, v, centered=centered, previous=previous, momentum=momentum)
        previous = per_sample_grads(work.loss_fn, work.params, work.batch, wanted, weights=weights, **options)
        expected = spring(rows, v, float(momentum) * kept, weights=weights, strength=0.3, centered=centered)
        assert_trees_close(vector(previous), expected, 1e-9)
        kept = expected


def test_previous_results_of_each_parameter_by_itself():
    work, v = build("mlp_td"), draw(5)
    previous = per_sample_grads(work.loss_fn, work.params, work.batch, ps.Mean())
    wanted = NaturalGradient(0.3, v, per_param=True, previous=previous, momentum=0.9)
    found = per_sample_grads(work.loss_fn, work.params, work.batch, wanted)
    rows = oracle(work.loss_fn, work.params, work.batch)
    for grads, (name, kept) in zip(rows.grads, previous.items(), strict=True):
        one = Rows([grads], rows.losses, None)
        expected = spring(one, v, 0.9 * kept.flatten(), weights=torch.ones(5, dtype=F64), strength=0.3)
        assert_trees_close(found[name].flatten(), expected, 1e-9)


def test_without_damping_and_with_all_momentum_a_previous_result_is_projected():
    """The method of Kaczmarz: of all solutions, the one nearest to the previous result."""
    x, v, previous = draw(3, 7), draw(3, seed=1), draw(7, seed=2)
    found = per_sample_grads(linear, draw(7), x, NaturalGradient(0.0, v, previous=previous, momentum=1.0))
    assert_trees_close(found, previous + torch.linalg.pinv(x) @ (v - x @ previous), 1e-9)


def test_a_previous_result_of_a_sample_that_does_not_count_may_be_anything():
    x, weights = draw(3, 4), torch.tensor([1.0, 0.0, 1.0])
    x[1] = NAN
    wanted = NaturalGradient(0.1, draw(3), previous=draw(4, seed=1))
    found = per_sample_grads(linear, draw(4), x, wanted, weights=weights)
    alone = per_sample_grads(linear, draw(4), x[::2], NaturalGradient(0.1, draw(3)[::2], previous=draw(4, seed=1)))
    assert_trees_close(found, alone, 1e-12)


@pytest.mark.parametrize("engine", ["eager", "traced"])
def test_a_previous_result_may_be_written_over(engine):
    def linear(w, x):
        return w @ x

    w, x, previous = draw(4), draw(3, 4), None
    expected = [None]
    for _ in range(3):
        wanted = NaturalGradient(0.1, previous=expected[-1] if expected[-1] is None else expected[-1].clone())
        expected.append(per_sample_grads(linear, w, x, wanted))
    for one in expected[1:]:
        previous = per_sample_grads(linear, w, x, NaturalGradient(0.1, previous=previous), engine=engine, out=previous)
        assert_trees_close(previous, one, 1e-12)


def test_previous_results_take_two_programs():
    def loss(w, x):
        return (w @ x) ** 2 + 1

    w, x, previous = draw(3), draw(5, 3), None
    for momentum in (0.9, 0.5, 0.7):
        wanted = NaturalGradient(0.1, previous=previous, momentum=momentum)
        found = per_sample_grads(loss, w, x, wanted, engine="traced")
        assert_trees_close(found, per_sample_grads(loss, w, x, wanted), 1e-10)
        previous = found
    assert len(ps.explain(loss, w, x, engine="traced").compilations) == 2


@pytest.mark.parametrize(
    ("previous", "message"),
    [
        (torch.ones(4), r"expected shape \[3\] for params, received shape \[4\]"),
        ([torch.ones(3)], "expected a tensor for params, received list"),
        (torch.ones(3) + 1j, "expected real numbers for params, received torch.complex64"),
    ],
)
def test_no_previous_result(previous, message):
    with pytest.raises(ArgumentError, match=f"previous: {message}.*the last result"):
        per_sample_grads(linear, draw(3), draw(2, 3), NaturalGradient(0.1, previous=previous))


@pytest.mark.parametrize("momentum", [-0.1, 1.5, NAN, True, None, torch.ones(2)])
def test_no_momentum(momentum):
    with pytest.raises(ArgumentError, match="momentum: expected a number from 0 to 1, received"):
        NaturalGradient(0.1, momentum=momentum)


def of_condition(rows, columns, decades):
    """A matrix of singular values from 1 to 10^-decades, its pseudo-inverse, and a right side that it can fit."""
    rank = min(rows, columns)
    left, right = torch.linalg.qr(draw(rows, rank))[0], torch.linalg.qr(draw(columns, rank, seed=1))[0]
    values = torch.logspace(0, -decades, rank, dtype=F64)
    solution = right @ draw(rank, seed=2)
    return (left * values) @ right.T, solution


@pytest.mark.parametrize("engine", ["eager", "loop", "traced"])
@pytest.mark.parametrize("decades", [3, 6, 8, 10])
@pytest.mark.parametrize(("rows", "columns"), [(12, 30), (30, 12), (20, 20)])
@pytest.mark.filterwarnings("ignore::persample.ConditionWarning")
def test_qr_does_not_square_the_condition_number(rows, columns, decades, engine):
    x, solution = of_condition(rows, columns, decades)
    v = x @ solution
    wanted = NaturalGradient(0.0, v, solver="qr")
    found = per_sample_grads(lambda w, x: w @ x, draw(columns), x, wanted, engine=engine)
    expected = torch.linalg.lstsq(x, v[:, None], driver="gelsd", rcond=1e-15).solution[:, 0]
    bound = 1e-14 * 10**decades
    assert (found - solution).norm() < bound * solution.norm()
    assert (found - expected).norm() < bound * solution.norm()
    if decades == 10:  # whose square float64 does not hold
        by_gram = per_sample_grads(linear, draw(columns), x, NaturalGradient(0.0, v))
        assert (by_gram - solution).norm() > 1e-2 * solution.norm()


@pytest.mark.parametrize("engine", ["eager", "loop", "traced"])
def test_qr_says_how_many_digits_are_right(engine):
    x, solution = of_condition(12, 30, 10)
    wanted = NaturalGradient(0.0, x @ solution, solver="qr")
    message = r"condition number of the gradients is 1e\+10, of rank 12; about 6 digits .*larger damping"
    with pytest.warns(ps.ConditionWarning, match=message):
        per_sample_grads(lambda w, x: w @ x, draw(30), x, wanted, engine=engine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = NaturalGradient(1e-6, x @ solution, solver="qr")
        per_sample_grads(lambda w, x: w @ x, draw(30), x, wanted, engine=engine)


@ENGINES
def test_qr_of_repeated_and_of_missing_gradients(options):
    for x in (draw(3, 7)[[0, 1, 2, 2, 2]], draw(7, 3)[:, [0, 1, 1]], torch.zeros(4, 3, dtype=F64)):
        v = draw(len(x), seed=1)
        wanted = NaturalGradient(0.0, v, solver="qr")
        found = per_sample_grads(lambda w, x: w @ x, draw(x.shape[1]), x, wanted, **options)
        assert_trees_close(found, torch.linalg.pinv(x) @ v, 1e-9, 1e-14)


@pytest.mark.parametrize("x", ROTTEN[:3], ids=["second", "last", "infinite"])
@ENGINES
def test_nan_reaches_every_number_by_qr(options, x):
    assert per_sample_grads(lambda w, x: w @ x, draw(2), x, NaturalGradient(0.5, solver="qr"), **options).isnan().all()


@ENGINES
def test_qr_with_weights_and_previous_results(options):
    work, v, weights = build("mlp_td"), draw(5), torch.tensor([1.0, 0.5, 2.0, 1.0, 0.0]).double()
    previous = per_sample_grads(work.loss_fn, work.params, work.batch, ps.Mean())
    batch = [x.clone() for x in work.batch]
    batch[0][4] = v[4] = NAN
    for per_param, centered in itertools.product((False, True), (False, True)):
        wanted = [
            NaturalGradient(0.3, v, per_param, centered, previous, 0.9, solver=solver) for solver in ("gram", "qr")
        ]
        by_gram, by_qr = per_sample_grads(work.loss_fn, work.params, tuple(batch), wanted, weights=weights, **options)
        assert_trees_close(by_qr, by_gram, 1e-9)


def test_qr_of_complex_parameters_after_an_odd_number_of_real_ones():
    w, x = {"real": draw(3), "complex": torch.complex(draw(2), draw(2, seed=1))}, draw(4, 3)

    def loss(w, x):
        return (w["real"] @ x).sin() + (w["complex"] @ x[:2].to(w["complex"].dtype)).abs()

    by_gram, by_qr = per_sample_grads(loss, w, x, [NaturalGradient(0.1, solver=solver) for solver in ("gram", "qr")])
    assert_trees_close(by_qr, by_gram, 1e-9)


def test_no_solver():
    with pytest.raises(ArgumentError, match="solver: expected 'gram' or 'qr', received 'lu'"):
        NaturalGradient(0.1, solver="lu")
