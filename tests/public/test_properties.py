"""Promises 2 to 4 as properties: chunks, permutations, weights, means, clipping bounds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import assert_trees_close, oracle
from workloads import build

import persample as ps
from persample import per_sample_grads

settings.register_profile("persample", max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("persample")

OVER_SAMPLES = {
    "Sum": ps.Sum(),
    "Mean": ps.Mean(),
    "ClippedSum": ps.ClippedSum(0.3),
    "ClippedMean": ps.ClippedMean(0.3, per_param=True),
    "WeightedSum": ps.WeightedSum(lambda norm: 1 / (1 + norm)),
    "SecondMoment": ps.SecondMoment(),
    "Variance": ps.Variance(),
    "NoiseScale": ps.NoiseScale(),
}
ROWS = {
    "Stack": ps.Stack(),
    "Norm": ps.Norm(),
    "Norm-per_param": ps.Norm(per_param=True),
    "Project": ps.Project(4, seed=0),
    "Loss": ps.Loss(),
}
PAIRS = {"Gram": ps.Gram(), "CosineSimilarity": ps.CosineSimilarity()}
EVERY = OVER_SAMPLES | ROWS | PAIRS

seeds = st.integers(0, 1000)


def linear(w, x):
    """The gradient of sample x is x itself."""
    return w @ x


def call(work, reduce, **options):
    return per_sample_grads(work.loss_fn, work.params, work.batch, reduce, **options)


@given(seed=seeds, chunk_size=st.integers(1, 9), weighted=st.booleans(), engine=st.sampled_from(["eager", "loop"]))
def test_chunked_equals_unchunked(seed, chunk_size, weighted, engine):
    work = build("mlp_td", seed=seed)
    weights = torch.rand(5, dtype=torch.float64) + 1 if weighted else None
    whole = call(work, EVERY, weights=weights)
    assert_trees_close(
        call(work, EVERY, weights=weights, chunk_size=chunk_size, engine=engine), whole, 1e-9, atol=1e-12
    )


@given(seed=seeds, order=st.permutations(range(5)))
def test_permuting_samples(seed, order):
    work = build("mlp_td", seed=seed)
    index = torch.tensor(order)
    shuffled = [x[index] for x in work.batch]
    before = call(work, EVERY)
    after = per_sample_grads(work.loss_fn, work.params, tuple(shuffled), EVERY)
    for name in OVER_SAMPLES:
        assert_trees_close(after[name], before[name], 1e-9, atol=1e-12)
    for name in ROWS:
        assert_trees_close(after[name], torch.utils._pytree.tree_map(lambda x: x[index], before[name]), 1e-9)
    for name in PAIRS:
        assert_trees_close(after[name], before[name][index][:, index], 1e-9)


@given(seed=seeds, counts=st.lists(st.integers(0, 3), min_size=5, max_size=5).filter(lambda c: c.count(0) < 4))
def test_weight_k_counts_k_times(seed, counts):
    work = build("mlp_td", seed=seed)
    weights = torch.tensor(counts)
    repeated = tuple(x.repeat_interleave(weights, dim=0) for x in work.batch)
    expected = per_sample_grads(work.loss_fn, work.params, repeated, OVER_SAMPLES)
    for chunk_size in (None, 2):
        assert_trees_close(call(work, OVER_SAMPLES, weights=weights, chunk_size=chunk_size), expected, 1e-9, atol=1e-12)


@given(seed=seeds, weights=st.lists(st.floats(-3, 3).map(lambda w: round(w, 3)), min_size=5, max_size=5))
def test_sums_are_linear_in_the_weights(seed, weights):
    work = build("mlp_td", seed=seed)
    stacked = call(work, None)
    total = call(work, ps.Sum(), weights=weights)
    w = torch.tensor(weights, dtype=torch.float64)
    for name, rows in stacked.items():
        torch.testing.assert_close(total[name], torch.tensordot(w, rows, 1), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", OVER_SAMPLES)
@pytest.mark.parametrize("engine", ["eager", "loop"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_sample_of_weight_zero_is_gone_even_if_it_is_nan(name, engine, poison):
    work = build("mlp_td")
    weights = torch.tensor([1, 1, 0, 1, 2])
    kept = weights > 0
    without = tuple(x[kept] for x in work.batch)
    expected = per_sample_grads(work.loss_fn, work.params, without, EVERY[name], weights=weights[kept])
    for x in work.batch:
        x[2] = poison
    for chunk_size in (None, 1):  # a chunk of weight 0 alone, too
        result = call(work, EVERY[name], weights=weights, engine=engine, chunk_size=chunk_size)
        assert_trees_close(result, expected, 1e-9)


@pytest.mark.parametrize("name", ROWS | PAIRS)
def test_per_sample_results_ignore_weights(name):
    work = build("mlp_td")
    assert_trees_close(call(work, EVERY[name], weights=[0, 1, 2, 3, 4]), call(work, EVERY[name]), 0)


@pytest.mark.parametrize("workload", ["mlp_td", "reinforce_episodes", "tied_weights", "complex_params"])
def test_mean_is_the_gradient_of_the_mean_loss(workload):
    work = build(workload)
    params = work.params
    leaves = list(params.parameters()) if isinstance(params, torch.nn.Module) else list(params.values())
    for leaf in leaves:
        leaf.requires_grad_()
    loss = torch.stack([work.loss_fn(params, *sample) for sample in zip(*work.batch, strict=True)]).mean()
    expected = torch.autograd.grad(loss, leaves)
    assert_trees_close(list(call(work, ps.Mean()).values()), list(expected), 1e-9)


# ---- clipping

EPS = {torch.float64: 2**-52, torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.mark.parametrize("dtype", EPS, ids=lambda d: str(d)[6:])
@given(seed=seeds, bound=st.floats(1e-3, 1e3), size=st.sampled_from([1, 3, 1000, 5000]))
@settings(max_examples=15)
def test_no_contribution_exceeds_the_bound(dtype, seed, bound, size):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(1, size, generator=generator, dtype=torch.float64) * 10).to(dtype)
    got = per_sample_grads(linear, torch.zeros(size, dtype=dtype), (x,), ps.ClippedSum(bound))
    assert got.double().norm() <= bound * (1 + 4 * EPS[dtype])


def test_the_bound_holds_for_a_million_parameters():
    x = torch.randn(1, 3_000_000, generator=torch.Generator().manual_seed(0))
    got = per_sample_grads(linear, torch.zeros(3_000_000), (x,), ps.ClippedSum(1.0))
    assert abs(got.double().norm().item() - 1) <= 4 * EPS[torch.float32]


@pytest.mark.parametrize("size", [64, 511, 1000, 4096])
def test_the_bound_holds_for_equal_numbers(size):
    """The roundings of their squares add up, those of random numbers do not."""
    for value in torch.linspace(0.05, 5, 40):
        x = value.expand(1, size)
        got = per_sample_grads(linear, torch.zeros(size), (x,), ps.ClippedSum(0.01))
        assert got.double().norm() <= 0.01 * (1 + 4 * EPS[torch.float32])


@given(seed=seeds, bound=st.floats(0.01, 10))
def test_sensitivity(seed, bound):
    """Replacing one sample moves the clipped sum by at most 2C, adding or removing one by at most C."""
    generator = torch.Generator().manual_seed(seed)
    x, other = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64) * 5
    w = torch.zeros(4, dtype=torch.float64)
    replaced = torch.cat([other[:1], x[1:]])
    full, swapped, less = (per_sample_grads(linear, w, (rows,), ps.ClippedSum(bound)) for rows in (x, replaced, x[1:]))
    assert (full - swapped).norm() <= 2 * bound * (1 + 1e-12)
    assert (full - less).norm() <= bound * (1 + 1e-12)


@pytest.mark.parametrize("per_param", [False, True])
@pytest.mark.parametrize("dtype", EPS, ids=lambda d: str(d)[6:])
def test_clipping_is_exact_at_its_edges(per_param, dtype):
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.5, 0.0]], dtype=dtype)
    w = torch.zeros(2, dtype=dtype)

    def clipped(bound):
        return per_sample_grads(linear, w, (x,), ps.ClippedSum(bound, per_param=per_param))

    assert torch.equal(clipped(0.0), torch.zeros_like(w))
    assert torch.equal(clipped(math.inf), per_sample_grads(linear, w, (x,), ps.Sum()))
    assert torch.equal(clipped(5.0), x.sum(0))  # a norm that equals the bound is not touched
    assert torch.equal(clipped(torch.tensor(5.0)), x.sum(0))
    zeros = per_sample_grads(linear, w, (torch.zeros_like(x),), ps.ClippedMean(1.0, per_param=per_param))
    assert torch.equal(zeros, torch.zeros_like(w))


def test_a_nan_gradient_is_not_hidden_by_clipping():
    x = torch.tensor([[math.nan, 0.0], [1.0, 0.0]])
    assert per_sample_grads(linear, torch.zeros(2), (x,), ps.ClippedSum(1.0)).isnan().any()


# ---- numerics of the rest


def test_variance_and_noise_scale_survive_a_large_mean():
    """At mean/std = 1000 a one-pass float32 variance is off by tens of percent."""
    x = (1000 + torch.randn(64, 3, generator=torch.Generator().manual_seed(0))).float()
    wanted = {"variance": ps.Variance(), "noise": ps.NoiseScale()}
    for chunk_size in (None, 7):
        got = per_sample_grads(linear, torch.zeros(3), (x,), wanted, chunk_size=chunk_size)
        torch.testing.assert_close(got["variance"], x.double().var(0).float(), rtol=1e-6, atol=0)
        torch.testing.assert_close(got["noise"].covariance_trace, x.double().var(0).sum().float(), rtol=1e-6, atol=0)


def test_norms_of_many_parameters_are_accurate():
    x = torch.rand(2, 5_000_000, generator=torch.Generator().manual_seed(0))
    got = per_sample_grads(linear, torch.zeros(5_000_000), (x,), ps.Norm())
    torch.testing.assert_close(got.double(), x.double().norm(dim=1), rtol=2**-23, atol=0)


def test_projection_preserves_inner_products_in_expectation():
    work = build("nested_params")
    gram = call(work, ps.Gram())
    estimates = [p @ p.T for p in (call(work, ps.Project(64, seed=seed)) for seed in range(60))]
    spread = torch.stack(estimates).std(0) / len(estimates) ** 0.5
    assert ((torch.stack(estimates).mean(0) - gram).abs() < 5 * spread + 1e-9).all()
    assert not torch.equal(estimates[0], estimates[1])


@given(seed=seeds)
def test_gram_and_cosines_agree_with_norms(seed):
    work = build("cnn_group_norm", seed=seed)
    got = call(work, {"gram": ps.Gram(), "cosine": ps.CosineSimilarity(), "norm": ps.Norm()})
    torch.testing.assert_close(got["gram"].diag().sqrt(), got["norm"], rtol=1e-9, atol=0)
    torch.testing.assert_close(got["cosine"].diag(), torch.ones_like(got["norm"]), rtol=1e-9, atol=0)


def test_cosine_of_a_zero_gradient_is_zero():
    x = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    got = per_sample_grads(linear, torch.zeros(2), (x,), ps.CosineSimilarity())
    torch.testing.assert_close(got, torch.tensor([[1.0, 0.0], [0.0, 0.0]]))


def test_a_weight_function_cannot_mix_samples():
    """f sees one norm at a time: its sum is that norm, not the sum over the batch, so chunks agree."""
    work = build("mlp_td")
    mixing = ps.WeightedSum(lambda norm: norm / norm.sum())
    assert_trees_close(call(work, mixing), call(work, ps.Sum()), 1e-12)
    constant = ps.WeightedSum(lambda norm: 2.0)
    rows = oracle(work.loss_fn, work.params, work.batch)
    assert_trees_close(list(call(work, constant).values()), [2 * g.sum(0) for g in rows.grads], 1e-12)


@pytest.mark.parametrize("size", [1, 3, 3000])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-19, 1.0, 1e19, 1e30])
def test_float32_gradients_of_any_magnitude(magnitude, size):
    """Their squares vanish below 1e-19 and overflow above 1e19; norms, clipping and cosines must not."""
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(0)) * magnitude
    x[1] = 0
    wanted = {"norm": ps.Norm(), "clipped": ps.ClippedSum(magnitude), "cosine": ps.CosineSimilarity()}
    got = per_sample_grads(linear, torch.zeros(size), (x,), wanted)
    exact = x.double()
    norms = exact.norm(dim=1)
    unit = exact / norms.clamp(min=1e-300)[:, None]
    torch.testing.assert_close(got["norm"].double(), norms, rtol=1e-6, atol=0)
    expected = (unit * norms.clamp(max=magnitude)[:, None]).sum(0)
    torch.testing.assert_close(got["clipped"].double(), expected, rtol=1e-5, atol=1e-6 * magnitude)
    torch.testing.assert_close(got["cosine"].double(), unit @ unit.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("magnitude", "bound"), [(3e38, 1e-6), (1e37, 1e-4), (1e-40, 1e-42)])
def test_the_bound_holds_where_the_scale_leaves_float32(magnitude, bound):
    x = torch.full((2, 100), magnitude)
    x[1] = 1e-3
    got = per_sample_grads(linear, torch.zeros(100), (x[:1],), ps.ClippedSum(bound))
    assert got.double().norm() <= bound * (1 + 4 * EPS[torch.float32]) + 100 * 1.5e-45  # the smallest float32
    expected = (x.double() * (bound / x.double().norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
    both = per_sample_grads(linear, torch.zeros(100), (x,), ps.ClippedSum(bound))
    torch.testing.assert_close(both.double(), expected, rtol=1e-5, atol=1.5e-45)


def test_lengths_and_cosines_of_tiny_gradients():
    x = torch.tensor([[1e-40, 0.0], [1e-40, 1e-40]])
    got = per_sample_grads(linear, torch.zeros(2), (x,), (ps.CosineSimilarity(), ps.WeightedSum(lambda n: 1 / n)))
    half = 0.5**0.5
    torch.testing.assert_close(got[0], torch.tensor([[1.0, half], [half, 1.0]]), rtol=1e-4, atol=0)
    torch.testing.assert_close(got[1], torch.tensor([1 + half, half]), rtol=1e-4, atol=0)


def test_norms_of_infinite_and_nan_gradients_say_so():
    x = torch.tensor([[math.inf, 1.0], [math.nan, 1.0], [3.0, 4.0]])
    got = per_sample_grads(linear, torch.zeros(2), (x,), ps.Norm())
    assert got.tolist()[0] == math.inf
    assert math.isnan(got.tolist()[1])
    assert got.tolist()[2] == 5.0
