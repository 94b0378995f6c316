"""Statistics of samples in units against plain loops over gradients in float64, and against what they estimate."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from oracle import assert_trees_close, oracle, reals
from torch import nn

from persample import ArgumentError, LossError, NaturalGradient, NoiseScale, Sum, per_sample_grads
from persample.losses import categorical_log_prob, clipped_surrogate_pg_loss, reinforce_loss
from persample.rl.diagnostics import policy_gradients

F64 = torch.float64
ENGINES = pytest.mark.parametrize(
    "options", [{}, {"chunk_size": 3}, {"engine": "traced"}, {"engine": "loop"}], ids=lambda o: str([*o.values()] or "")
)
UNITS = {
    "pairs": (2, [0, 0, 1, 1, 2, 2, 3, 3]),
    "ids": (torch.tensor([9, 2, 9, 9, 2, 5, 5, 9]), [0, 1, 0, 0, 1, 2, 2, 0]),
    "one of one": ([4, 4, 4, 4, 4, 4, 4, 1], [0] * 7 + [1]),
}
WEIGHTS = {"": None, "weights": torch.tensor([1.0, 2, 0, 1, 1.5, 2, 2, 1], dtype=F64)}
T = 4
LENGTHS = torch.tensor([4, 2, 3, 1, 4, 4, 2, 3])
MASK = torch.arange(T) < LENGTHS[:, None]


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=F64)


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


S_T, A_T = draw(8, T, 3), torch.randint(3, (8, T), generator=torch.Generator().manual_seed(0))
ADVANTAGES, RATIO = draw(8), 1 + draw(8, T) / 3


def reinforce(policy, s_t, a_t, advantage, mask_t):
    return reinforce_loss(policy(s_t), a_t, advantage.expand(T), mask_t)


def ppo(policy, s_t, a_t, advantage, mask_t, ratio_t):
    """With the log-probabilities of an older policy, such that some ratios are clipped."""
    log_pi_t = categorical_log_prob(policy(s_t), a_t)
    ratio_t = ratio_t.abs() * (log_pi_t - log_pi_t.detach()).exp()
    return clipped_surrogate_pg_loss(ratio_t, advantage.expand(T), 0.2, mask_t=mask_t)


def grpo(policy, s_t, a_t, mask_t):
    """−log π of a completion, divided by its length; its advantage is an argument of policy_gradients."""
    return reinforce_loss(policy(s_t), a_t, torch.ones(T, dtype=F64), mask_t, reduction="mean")


LOSSES = {
    "REINFORCE": (reinforce, (S_T, A_T, ADVANTAGES, MASK), None),
    "PPO": (ppo, (S_T, A_T, ADVANTAGES, MASK, RATIO), None),
    "GRPO": (grpo, (S_T, A_T, MASK), ADVANTAGES),
}


def by_hand(rows, a, w, unit, damping=None):
    """The statistics of gradients ``rows [N, P]`` of advantage 1, by loops over the units."""
    g, n, samples = a[:, None] * rows, w.sum(), range(len(rows))
    mean = (w[:, None] * g).sum(0) / n
    members = {u: [i for i in samples if unit[i] == u] for u in dict.fromkeys(unit)}
    sizes = {u: sum(w[i] for i in own) for u, own in members.items()}
    means = {u: sum(w[i] * g[i] for i in own) / sizes[u] for u, own in members.items() if sizes[u] > 0}
    spread = {u: sum(w[i] * (g[i] - means[u]).square().sum() for i in members[u]) for u in means}
    count = len(means)
    within = sum(spread.values()) / (n - count)
    of_units = sum(sizes[u] * (x - mean).square().sum() for u, x in means.items())
    between = (of_units - (count - 1) * within) / (n - sum(size**2 for size in sizes.values()) / n)
    snr = []
    for u in members:
        noise = spread[u] / (sizes[u] - 1) if sizes[u] > 1 else None
        snr.append((means[u].square().sum() - noise / sizes[u]) / noise if noise else torch.tensor(0.0, dtype=F64))
    without = [sum(w[i] * g[i] for v in means if v != u for i in members[v]) / (n - sizes[u]) for u in means]
    trace = (count - 1) * sum((x - mean).square().sum() for x in without)  # U Var[mean], by the jackknife
    signal = mean.square().sum() - trace / count
    cosines = torch.where(w > 0, torch.nn.functional.cosine_similarity(g, mean[None]), 0)
    damping = damping or (w * rows.square().sum(1)).sum() / n
    natural = torch.linalg.solve(rows @ rows.T * w / n + damping * torch.eye(len(rows), dtype=F64), a)
    noise_scale = trace / signal if signal > 0 else torch.tensor(math.inf, dtype=F64)
    return (
        mean,
        within,
        between,
        torch.stack(snr),
        (trace, signal, noise_scale),
        cosines,
        torch.where(w > 0, natural, 0),
    )


def assert_is(found, expected):
    mean, *others = expected
    update = torch.cat([x.flatten() for x in found.update.values()])
    assert_trees_close(update, mean, 1e-12)
    for field, x, y in zip(found._fields[1:], found[1:], others, strict=True):
        pair = [tuple(z) if field == "noise" else z.flatten() for z in (x, y)]
        torch.testing.assert_close(*pair, rtol=1e-9, atol=1e-12, msg=lambda text, field=field: f"{field}: {text}")


@ENGINES
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("loss", LOSSES)
def test_statistics_are_those_of_the_loop(loss, units, options):
    fn, batch, advantages = LOSSES[loss]
    unit, places = UNITS[units]
    rows = reals(oracle(fn, network(), batch))
    for weights in WEIGHTS.values():
        found = policy_gradients(fn, network(), batch, advantages, unit=unit, weights=weights, damping=0.1, **options)
        a = torch.ones(8, dtype=F64) if advantages is None else advantages
        w = torch.ones(8, dtype=F64) if weights is None else weights
        assert_is(found, by_hand(rows, torch.where(w > 0, a, 0), w, places, 0.1))


def token_losses(policy, s_t, a_t):
    return -categorical_log_prob(policy(s_t), a_t)


@ENGINES
@pytest.mark.parametrize("unit", [1, 4], ids=["completions", "prompts"])
def test_tokens_are_samples_of_completions_and_of_prompts(unit, options):
    flat = S_T.flatten(0, 1)[:, None], A_T.flatten()[:, None]
    rows = reals(oracle(lambda policy, s, a: token_losses(policy, s, a)[0], network(), flat))
    places = [i // unit for i in range(8) for _ in range(T)]
    for advantages in (draw(8, T), ADVANTAGES):
        given = {"unit": unit, "weights": MASK, "outputs": "rows"}
        found = policy_gradients(token_losses, network(), (S_T, A_T), advantages, **given, **options)
        a, w = advantages.view(8, -1).expand(8, T).flatten(), MASK.flatten().double()
        assert_is(found, by_hand(rows, torch.where(w > 0, a, 0), w, places))
        assert found.cosines.shape == found.natural.shape == (8, T)
        assert found.snr.shape == (8 // unit,)


def test_the_solve_and_the_noise_are_those_of_the_reductions():
    fn, batch, advantages = LOSSES["GRPO"]
    w = WEIGHTS["weights"]
    for weights in (None, w):
        n = 8 if weights is None else w.sum()
        found = policy_gradients(fn, network(), batch, advantages, unit=2, weights=weights, damping=0.03)
        coefficients = found.natural if weights is None else w * found.natural
        natural = per_sample_grads(fn, network(), batch, NaturalGradient(0.03, advantages), weights=weights)
        total = per_sample_grads(fn, network(), batch, Sum(), weights=coefficients / n)
        assert_trees_close(total, natural, 1e-9)
    plain = policy_gradients(fn, network(), batch, unit=2)
    assert_trees_close(
        plain.noise, per_sample_grads(fn, network(), batch, NoiseScale(), unit=2, unit_reduce="mean"), 1e-9
    )


def linear(theta, s):
    """A sample's gradient is the sample."""
    return theta @ s


def of(s, **options):
    return policy_gradients(linear, torch.zeros(s.shape[1], dtype=s.dtype), s, **options)


@pytest.mark.parametrize("seed", range(5))
def test_sums_of_squares_add_up(seed):
    """Within and between units they are the sum around the mean."""
    generator = torch.Generator().manual_seed(seed)
    s, w = torch.randn(12, 5, generator=generator, dtype=F64), torch.rand(12, generator=generator, dtype=F64) + 1
    ids = torch.randint(4, (12,), generator=generator)
    sizes, n = torch.zeros(4, dtype=F64).index_add(0, ids, w), w.sum()
    found, count = of(s, unit=ids, weights=w), (sizes > 0).sum()
    of_units = (n - sizes.square().sum() / n) * found.between + (count - 1) * found.within
    total = (w[:, None] * (s - (w[:, None] * s).sum(0) / n).square()).sum()
    torch.testing.assert_close((n - count) * found.within + of_units, total)


def test_estimates_are_unbiased():
    """Their average over all draws of three units from two and two samples of each is what they estimate."""
    population = draw(2, 2, 4)  # units, equally likely samples, parameters
    found = []
    for units in itertools.product(range(2), repeat=3):
        for samples in itertools.product(range(2), repeat=6):
            s = torch.stack([population[units[i // 2], sample] for i, sample in enumerate(samples)])
            statistics = of(s, unit=2)
            found.append([*statistics[1:3], *statistics.noise[:2]])
    within, between, trace, signal = torch.tensor(found, dtype=F64).mean(0)
    means = population.mean(1)
    torch.testing.assert_close(within, (population - means[:, None]).square().sum(-1).mean())
    torch.testing.assert_close(between, (means - means.mean(0)).square().sum(-1).mean())
    torch.testing.assert_close(within + between, (population - means.mean(0)).square().sum(-1).mean())
    torch.testing.assert_close(trace, between + within / 2)
    torch.testing.assert_close(signal, means.mean(0).square().sum())


def test_noise_of_units_of_unequal_sizes_is_not_too_small():
    """Its average over all draws of one gradient for each unit is the variance of the update, or up to half more."""
    for sizes in ([4, 1, 1], [5, 2], [3, 2, 2, 1]):
        ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        found = [
            of(torch.tensor(g, dtype=F64)[ids, None] + 0.5, unit=ids)
            for g in itertools.product((-1, 1), repeat=len(sizes))
        ]
        updates = torch.stack([x.update for x in found])
        estimate = torch.stack([x.noise.covariance_trace for x in found]).mean() / len(sizes)
        assert 1 <= estimate / updates.var(0, correction=0).sum() < 1.5


def test_the_mean_reward_as_a_baseline_scales_the_signal():
    """Over all groups of n actions, the estimate of ‖E g‖² is 1 + 1/(n − 1)² times too large."""
    logits, reward = torch.tensor([0.5, -0.3, 0.1], dtype=F64), torch.tensor([1.0, 0.0, 0.5], dtype=F64)
    pi, n = logits.softmax(0), 3
    scores = torch.eye(3, dtype=F64) - pi
    signal = mean = 0
    for actions in itertools.product(range(3), repeat=n):
        a = torch.tensor(actions)
        g = (reward[a] - reward[a].mean())[:, None] * scores[a]
        probability = pi[a].prod()
        signal = signal + probability * (g.sum(0).square().sum() - g.square().sum()) / (n * (n - 1))
        mean = mean + probability * g.mean(0)
        snr = of(torch.cat([g, scores]), unit=n).snr[0]
        deviation = (g - g.mean(0)).square().sum() / (n - 1)
        if deviation > 0:
            torch.testing.assert_close(snr * deviation, (g.sum(0).square().sum() - g.square().sum()) / (n * (n - 1)))
    torch.testing.assert_close(signal, (1 + 1 / (n - 1) ** 2) * mean.square().sum())


def test_weights_count_copies():
    s, copies = draw(6, 3), torch.tensor([1, 3, 2, 1, 0, 2])
    found = of(s, unit=[0, 0, 1, 1, 1, 2], weights=copies)
    expected = of(s.repeat_interleave(copies, 0), unit=torch.tensor([0, 0, 1, 1, 1, 2]).repeat_interleave(copies))
    for field in ("update", "within", "between", "snr", "noise"):
        torch.testing.assert_close(getattr(found, field), getattr(expected, field))
    kept = copies > 0
    for field in ("cosines", "natural"):
        torch.testing.assert_close(
            getattr(found, field)[kept].repeat_interleave(copies[kept]), getattr(expected, field)
        )


def test_what_has_weight_0_is_removed_with_its_nan():
    s = draw(6, 3)
    expected = of(s[:4], unit=2)
    s[4:] = math.nan
    found = of(s, unit=2, weights=[1, 1, 1, 1, 0, 0])
    advantages = torch.tensor([1.0, 1, 1, 1, math.nan, math.inf])
    theta = torch.zeros(3, dtype=F64)
    others = policy_gradients(linear, theta, s, advantages, unit=2, weights=[True] * 4 + [False] * 2)
    for x in (found, others):
        torch.testing.assert_close(x._replace(snr=x.snr[:2], cosines=x.cosines[:4], natural=x.natural[:4]), expected)
        assert not x.cosines[4:].any()
        assert not x.natural[4:].any()
        assert x.snr[2] == 0


def test_zero_gradients():
    for found in (of(torch.zeros(4, 3), unit=2), policy_gradients(linear, draw(3), draw(4, 3), torch.zeros(4), unit=2)):
        assert not any(x.any() for x in (found.update, found.within, found.between, found.snr, found.cosines))
        assert found.noise == (0, 0, math.inf)
        assert found.natural.isfinite().all()


def test_units_alike_and_units_that_cancel():
    one = torch.tensor([[1.0, 0, 0]])
    found = of(torch.cat([one, one, one, -one]), unit=2)
    assert found.snr.tolist() == [math.inf, -0.5]
    assert found.cosines.tolist() == [1, 1, 1, -1]
    assert of(torch.cat([one, -one, one, -one]), unit=2).noise.noise_scale == math.inf
    for seed in range(20):  # of one unit alone, variance and signal cannot be told apart
        alone = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
        assert of(torch.cat([alone, torch.zeros(6, 3)]), unit=2).noise.noise_scale == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_small_deviations_from_a_large_mean(dtype):
    """Of float32 gradients nothing more is lost than by their own rounding."""
    s = (1e4 + draw(8, 3)).to(dtype)
    found, expected = of(s, unit=2), of(s.double() - 1e4, unit=2)
    torch.testing.assert_close(found.within, expected.within, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.between, expected.between, rtol=1e-6, atol=0)
    assert found.update.dtype == dtype


def test_half_precision_and_complex_parameters():
    s = draw(4, 3)
    found = of(s.bfloat16(), unit=2)
    torch.testing.assert_close(found.within, of(s.bfloat16().double(), unit=2).within)
    z = torch.complex(s, s.flip(0))
    found = policy_gradients(lambda theta, z: (theta * z).sum().real, torch.zeros(3, dtype=z.dtype), z, unit=2)
    expected = of(torch.cat([s, -s.flip(0)], 1), unit=2)
    assert_trees_close(torch.view_as_real(found.update).mT.flatten().abs(), expected.update.abs(), 1e-12)
    for x, y in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(x, y)


class TestErrors:
    @pytest.mark.parametrize(
        ("size", "unit", "received"),
        [(4, 1, "4 of 4"), (4, 4, "1 of 4"), (1, 1, "1 of 1"), (4, [3] * 4, "1 of 4"), (0, 2, "0 of 0")],
        ids=["one sample each", "one unit", "one sample", "one id", "no sample"],
    )
    def test_units_without_variance(self, size, unit, received):
        with pytest.raises(ArgumentError, match=f"unit: expected two or more units that count, .* received {received}"):
            of(draw(size, 3), unit=unit)

    def test_units_that_weights_remove(self):
        with pytest.raises(ArgumentError, match=r"unit: expected two or more units that count, .* received 1 of 2"):
            of(draw(4, 3), unit=2, weights=[1, 1, 0, 0])

    @pytest.mark.parametrize("unit", [3, [0, 1], [0.5] * 4])
    def test_no_units(self, unit):
        with pytest.raises(ArgumentError, match="unit: expected"):
            of(draw(4, 3), unit=unit)

    @pytest.mark.parametrize("weights", [[1.0, 1, 1, -1], [0.0] * 4, [1, 1, 1, math.nan], [1, 1, 1, math.inf]], ids=str)
    def test_weights(self, weights):
        with pytest.raises(ArgumentError, match="weights: expected finite numbers >= 0, not all 0, received"):
            of(draw(4, 3), unit=2, weights=weights)

    @pytest.mark.parametrize("name", ["advantages", "weights"])
    def test_shapes(self, name):
        message = rf"{name}: expected shape \[4\] or \[4, 3\], received \[4, 2\]"
        with pytest.raises(ArgumentError, match=message):
            policy_gradients(
                lambda theta, s: theta * s, torch.zeros(3), draw(4, 3), outputs="rows", **{name: torch.ones(4, 2)}
            )
        with pytest.raises(ArgumentError, match=rf"{name}: expected .*\[?4\]?"):
            of(draw(4, 3), unit=2, **{name: torch.ones(3)})

    @pytest.mark.parametrize("damping", [0, -1.0, math.nan, math.inf])
    def test_damping(self, damping):
        with pytest.raises(ArgumentError, match="damping: expected a finite number > 0, received"):
            of(draw(4, 3), unit=2, damping=damping)

    def test_what_is_not_finite(self):
        with pytest.raises(ArgumentError, match="advantages: expected finite numbers, received NaN or infinity"):
            of(draw(4, 3), unit=2, advantages=torch.tensor([1, 1, 1, math.nan]))
        s = draw(4, 3)
        s[2, 1] = math.inf
        with pytest.raises(
            LossError, match=r"expected finite gradients, received NaN or infinity in sample 2\. Select"
        ):
            of(s, unit=2)
        with pytest.raises(LossError, match=r"in sample 2\. Select"):
            policy_gradients(lambda theta, s: theta * s, torch.zeros(3), s, outputs="rows")
