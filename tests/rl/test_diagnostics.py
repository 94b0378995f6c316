"""Diagnostics of policy gradients against plain loops over episodes, and on CartPole."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

from persample import ArgumentError, naive
from persample.losses import categorical_log_prob
from persample.rl import Episodes, categorical_policy, collect_episodes, make_envs
from persample.rl.diagnostics import (
    episode_gradients,
    estimator_variances,
    leave_one_out,
    optimal_baseline,
    reward_to_go,
    total_reward,
)

F64 = torch.float64
ENGINES = pytest.mark.parametrize(("engine", "chunk_size"), [("eager", None), ("eager", 3), ("loop", 2)], ids=str)
LENGTHS = torch.tensor([5, 1, 7, 3, 6])


def network(dtype=F64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def log_prob(policy, obs_t, a_t):
    return categorical_log_prob(policy(obs_t), a_t)


def made_up(junk=0.0, discount=0.9):
    """Five episodes of unequal length; padding holds junk and actions of −1."""
    generator = torch.Generator().manual_seed(1)
    mask_t = torch.arange(7) < LENGTHS[:, None]
    obs_t = torch.randn(5, 7, 3, generator=generator, dtype=F64)
    r_t = torch.randn(5, 7, generator=generator, dtype=F64) + 1
    discount_t = torch.full((5, 7), discount, dtype=F64)
    discount_t[torch.arange(5), LENGTHS - 1] = 0.0
    a_t = torch.randint(2, (5, 7), generator=generator)
    return Episodes(
        torch.where(mask_t[..., None], obs_t, junk),
        torch.where(mask_t, a_t, -1),
        torch.where(mask_t, r_t, junk),
        torch.where(mask_t, discount_t, junk),
        mask_t,
    )


def cut(episodes):
    """The episodes one by one, without padding."""
    for obs_t, a_t, r_t, discount_t, mask_t in zip(*episodes, strict=True):
        yield obs_t[mask_t], a_t[mask_t], r_t[mask_t].tolist(), discount_t[mask_t].tolist()


def rewards_from(r_t, discount_t, start):
    """Σ_{k≥start} γ^k r_k, by a loop."""
    total, gamma = 0.0, 1.0
    for k, (r, discount) in enumerate(zip(r_t, discount_t, strict=True)):
        total += gamma * r if k >= start else 0.0
        gamma *= discount
    return total


def step_scores(policy, obs_t, a_t):
    """∇log π of every single step, by autograd: [T, P]."""
    named = dict(policy.named_parameters())
    grads = naive.loop(lambda p, o, a: functional_call(policy, p, (o,)).log_softmax(-1)[a], named, (obs_t, a_t))
    return torch.stack([torch.cat([g.flatten() for g in grad.values()]) for _, grad in grads])


def by_hand(policy, episodes, weights_of):
    """Rows Σₜ wₜ ∇log π(aₜ|sₜ) of every episode; weights_of(r_t, discount_t) → a list of T weights."""
    rows = []
    for obs_t, a_t, r_t, discount_t in cut(episodes):
        weights = torch.tensor(weights_of(r_t, discount_t), dtype=obs_t.dtype)
        rows.append(weights @ step_scores(policy, obs_t, a_t))
    return torch.stack(rows)


def to_go(r_t, discount_t):
    return [rewards_from(r_t, discount_t, t) for t in range(len(r_t))]


def whole(r_t, discount_t):
    return [rewards_from(r_t, discount_t, 0)] * len(r_t)


def score(r_t, discount_t):
    return [1.0] * len(r_t)


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


class TestWeights:
    @pytest.mark.parametrize("junk", [0.0, math.nan], ids=str)
    @pytest.mark.parametrize(("weights", "expected"), [(total_reward, whole), (reward_to_go, to_go)])
    def test_equal_the_sums_by_hand(self, weights, expected, junk):
        episodes = made_up(junk)
        actual = weights(episodes)
        assert torch.equal(actual[~episodes.mask_t], torch.zeros(13, dtype=F64))
        for row, mask_t, (_, _, r_t, discount_t) in zip(actual, episodes.mask_t, cut(episodes), strict=True):
            close(row[mask_t], torch.tensor(expected(r_t, discount_t), dtype=F64))

    def test_leave_one_out(self):
        episodes = made_up()
        undiscounted = [[rewards_from(r[t:], d[t:], 0) for t in range(len(r))] for _, _, r, d in cut(episodes)]
        actual = leave_one_out(episodes)
        for i in range(5):
            for t in range(7):
                others = [returns[t] for j, returns in enumerate(undiscounted) if j != i and t < len(returns)]
                close(actual[i, t], torch.tensor(sum(others) / len(others) if others else 0.0, dtype=F64))

    def test_an_episodes_own_rewards_do_not_move_its_baseline(self):
        episodes = made_up()
        r_t = episodes.r_t.clone()
        r_t[2] += 100
        before, after = leave_one_out(episodes), leave_one_out(episodes._replace(r_t=r_t))
        close(after[2], before[2])
        assert (after[0, :5] > before[0, :5] + 20).all()

    @pytest.mark.parametrize("shape", [(), (7,), (5, 7)], ids=str)
    def test_baselines(self, shape):
        """γᵗ (Gₜ − bₜ), with every shape of b."""
        episodes, baseline = made_up(), torch.full(shape, 2.0, dtype=F64)
        difference = reward_to_go(episodes) - reward_to_go(episodes, baseline)
        close(difference, torch.where(episodes.mask_t, 2 * 0.9 ** torch.arange(7.0, dtype=F64), 0))
        close(reward_to_go(episodes, 2.0), reward_to_go(episodes, baseline))

    def test_a_baseline_per_episode_is_refused(self):
        with pytest.raises(ArgumentError, match=r"baseline_t: expected shape \[\], \[7\] or \[5, 7\], .* \[5\]"):
            reward_to_go(made_up(), torch.zeros(5))


class TestEpisodeGradients:
    @ENGINES
    def test_equals_the_loop(self, engine, chunk_size):
        policy, episodes = network(), made_up(math.nan)
        rows = by_hand(policy, episodes, to_go)
        actual = episode_gradients(log_prob, policy, episodes, chunk_size=chunk_size, engine=engine)
        close(actual.norms, rows.norm(dim=1))
        close(actual.cosines, torch.nn.functional.cosine_similarity(rows[:, None], rows[None], dim=-1))
        trace = rows.var(0).sum()
        squared_mean = rows.mean(0).square().sum() - trace / 5
        close(actual.noise.covariance_trace, trace)
        close(actual.noise.squared_mean, squared_mean)
        assert actual.batch_size == (math.ceil(trace / squared_mean) if squared_mean > 0 else math.inf)

    def test_weights_of_ones_own(self):
        policy, episodes = network(), made_up()
        rows = by_hand(policy, episodes, score)
        close(episode_gradients(log_prob, policy, episodes, torch.ones(5, 7, dtype=F64)).norms, rows.norm(dim=1))

    def test_parameters_as_a_tree(self):
        policy, episodes = network(), made_up()
        tree = {name: p.detach() for name, p in policy.named_parameters()}
        found = episode_gradients(
            lambda p, o, a: log_prob(lambda x: functional_call(policy, p, (x,)), o, a), tree, episodes
        )
        close(found.norms, episode_gradients(log_prob, policy, episodes).norms)

    def test_batch_size_of_alike_and_of_opposite_episodes(self):
        """The same episode twice needs a batch of 1; two that cancel need more than there are."""
        one = Episodes(*(x[[0, 0]] for x in made_up()))
        assert episode_gradients(log_prob, network(), one).batch_size == 1
        opposite = reward_to_go(one) * torch.tensor([[1.0], [-1.0]], dtype=F64)
        found = episode_gradients(log_prob, network(), one, opposite)
        assert found.batch_size == math.inf
        close(found.cosines, torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=F64))


class TestEstimatorVariances:
    @ENGINES
    def test_equals_the_loop(self, engine, chunk_size):
        policy, episodes = network(), made_up(math.nan)
        found = estimator_variances(log_prob, policy, episodes, chunk_size=chunk_size, engine=engine)
        baselines = iter(leave_one_out(episodes).tolist())

        def with_baseline(r_t, discount_t):
            pairs = zip(to_go(r_t, discount_t), next(baselines), strict=False)
            return [g - 0.9**t * b for t, (g, b) in enumerate(pairs)]

        expected = {"total reward": whole, "reward-to-go": to_go, "baseline": with_baseline}
        assert found.keys() == expected.keys()
        for name, weights_of in expected.items():
            rows = by_hand(policy, episodes, weights_of)
            close(found[name].covariance_trace, rows.var(0).sum())
            close(found[name].squared_mean, rows.mean(0).square().sum() - rows.var(0).sum() / 5)

    def test_estimators_of_ones_own(self):
        policy, episodes = network(), made_up()
        ones = torch.ones(5, 7, dtype=F64)
        found = estimator_variances(log_prob, policy, episodes, {"one": ones, "two": 2 * ones})
        rows = by_hand(policy, episodes, score)
        close(found["one"].covariance_trace, rows.var(0).sum())
        close(found["two"].covariance_trace, 4 * rows.var(0).sum())

    def test_one_pass(self):
        """The log-probabilities are asked for once, under vmap, whatever is to be found."""
        calls = []

        def counted(policy, obs_t, a_t):
            calls.append(obs_t)
            return log_prob(policy, obs_t, a_t)

        for fn, options in [
            (episode_gradients, {}),
            (estimator_variances, {}),
            (optimal_baseline, {}),
            (optimal_baseline, {"per_param": True}),
        ]:
            calls.clear()
            fn(counted, network(), made_up(), **options)
            assert len(calls) == 1


class TestOptimalBaseline:
    @ENGINES
    def test_equals_the_loop(self, engine, chunk_size):
        policy, episodes = network(), made_up(math.nan)
        options = {"chunk_size": chunk_size, "engine": engine}
        rewards, rows = total_reward(episodes)[:, 0], by_hand(policy, episodes, score)
        squared = rows.square()
        b = optimal_baseline(log_prob, policy, episodes, **options)
        close(b, (squared.sum(1) * rewards).sum() / squared.sum())
        per_param = optimal_baseline(log_prob, policy, episodes, per_param=True, **options)
        shapes = {name: p.shape for name, p in policy.named_parameters()}
        assert {name: x.shape for name, x in per_param.items()} == shapes
        flat = torch.cat([x.flatten() for x in per_param.values()])
        close(flat, (squared * rewards[:, None]).sum(0) / squared.sum(0), 1e-9)

    def test_no_other_constant_has_a_smaller_second_moment(self):
        policy, episodes = network(), made_up()
        rewards, rows = total_reward(episodes)[:, 0], by_hand(policy, episodes, score)
        b = optimal_baseline(log_prob, policy, episodes)
        entries = torch.cat(
            [x.flatten() for x in optimal_baseline(log_prob, policy, episodes, per_param=True).values()]
        )

        def second_moment(baseline):
            return ((rewards[:, None] - baseline) * rows).square().mean(0)

        for step in (-1.0, -1e-3, 1e-3, 1.0):
            assert second_moment(b).sum() < second_moment(b + step).sum()
            assert (second_moment(entries) <= second_moment(entries + step)).all()
        assert second_moment(entries).sum() < second_moment(b).sum() < second_moment(0.0).sum()

    def test_equal_rewards_and_parameters_without_gradient(self):
        episodes = made_up()
        equal = episodes._replace(r_t=torch.zeros_like(episodes.r_t))
        equal.r_t[:, 0] = 3.0
        params = {"used": torch.ones(3, 2, dtype=F64), "unused": torch.ones(2, dtype=F64)}

        def fn(params, obs_t, a_t):
            return categorical_log_prob(obs_t @ params["used"], a_t)

        assert optimal_baseline(fn, params, equal) == 3
        close(optimal_baseline(fn, params, equal, per_param=True)["used"], torch.full((3, 2), 3.0, dtype=F64))
        unused = optimal_baseline(fn, params, episodes, per_param=True)["unused"]
        close(unused, total_reward(episodes)[:, 0].mean().expand(2))
        nothing = made_up()._replace(obs_t=torch.zeros(5, 7, 3, dtype=F64))
        close(optimal_baseline(fn, params, nothing), total_reward(nothing)[:, 0].mean())


class TestErrors:
    @pytest.mark.parametrize("count", [0, 1])
    @pytest.mark.parametrize("fn", [episode_gradients, estimator_variances, optimal_baseline])
    def test_too_few_episodes(self, fn, count):
        few = Episodes(*(x[:count] for x in made_up()))
        with pytest.raises(ArgumentError, match=rf"episodes: expected 2 or more, received {count}"):
            fn(log_prob, network(), few)

    @pytest.mark.parametrize("fn", [episode_gradients, estimator_variances, optimal_baseline])
    def test_log_prob_fn_of_another_shape(self, fn):
        message = r"log_prob_fn: expected a function that returns log π\(aₜ\|sₜ\), shape \[7\], received shape \[7, 2\]"
        with pytest.raises(ArgumentError, match=message):
            fn(lambda policy, obs_t, a_t: policy(obs_t), network(), made_up())

    def test_weights_of_another_shape(self):
        with pytest.raises(ArgumentError, match=r"weight_t: expected shape \[5, 7\], received shape \[5\]"):
            episode_gradients(log_prob, network(), made_up(), torch.ones(5))
        with pytest.raises(ArgumentError, match=r"weights_t\['mine'\]: expected shape \[5, 7\], received shape \[7\]"):
            estimator_variances(log_prob, network(), made_up(), {"mine": torch.ones(7)})

    def test_weights_that_are_no_tensors(self):
        with pytest.raises(ArgumentError, match=r"weight_t: expected shape \[5, 7\], received list"):
            episode_gradients(log_prob, network(), made_up(), [[1.0] * 7] * 5)
        with pytest.raises(ArgumentError, match="weights_t: expected a dict of weights by name, received Tensor"):
            estimator_variances(log_prob, network(), made_up(), torch.ones(5, 7))

    @pytest.mark.parametrize("given", [tuple(made_up()), made_up()._asdict(), None], ids=lambda x: type(x).__name__)
    @pytest.mark.parametrize("fn", [episode_gradients, estimator_variances, optimal_baseline])
    def test_no_episodes(self, fn, given):
        message = f"episodes: expected Episodes, received {type(given).__name__}. Pass Episodes"
        with pytest.raises(ArgumentError, match=message):
            fn(log_prob, network(), given)

    @pytest.mark.parametrize("weights", [total_reward, reward_to_go, leave_one_out])
    def test_weights_of_no_episodes(self, weights):
        with pytest.raises(ArgumentError, match=r"episodes.mask_t: expected a tensor of shape .*, received NoneType"):
            weights(made_up()._replace(mask_t=None))
        with pytest.raises(ArgumentError, match=r"episodes.discount_t: .*\[5, 7\] as of r_t, received shape \[5\]"):
            weights(made_up()._replace(discount_t=torch.ones(5)))
        with pytest.raises(ArgumentError, match="episodes: expected Episodes, received tuple"):
            weights(tuple(made_up()))

    @pytest.mark.parametrize("fn", [episode_gradients, estimator_variances, optimal_baseline])
    def test_time_first(self, fn):
        time_first = Episodes(*(x.transpose(0, 1) for x in made_up()))
        with pytest.raises(ArgumentError, match=r"episodes.mask_t: expected real steps first, .* time the first axis"):
            fn(log_prob, network(), time_first)

    def test_masks_of_numbers(self):
        plain, numbers = made_up(), made_up()._replace(mask_t=made_up().mask_t.float())
        for weights in (total_reward, reward_to_go, leave_one_out):
            assert torch.equal(weights(numbers), weights(plain))
        close(episode_gradients(log_prob, network(), numbers), episode_gradients(log_prob, network(), plain))

    def test_no_estimators(self):
        with pytest.raises(ArgumentError, match="weights_t: expected a dict of weights by name, received an empty"):
            estimator_variances(log_prob, network(), made_up(), {})


@pytest.fixture(scope="module")
def cartpole():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    return policy, collect_episodes(make_envs("CartPole-v1"), categorical_policy(policy), 100, discount=1.0, seed=0)


def test_less_variance_on_cartpole(cartpole):
    """Each refinement estimates the same gradient with less variance, a baseline with about half of it."""
    policy, episodes = cartpole
    total = total_reward(episodes)
    best = total - optimal_baseline(log_prob, policy, episodes)
    estimators = {
        "total": total,
        "best constant": torch.where(episodes.mask_t, best, 0),
        "to go": reward_to_go(episodes),
        "baseline": reward_to_go(episodes, leave_one_out(episodes)),
    }
    found = estimator_variances(log_prob, policy, episodes, estimators)
    variance = {name: estimate.covariance_trace.item() for name, estimate in found.items()}
    assert variance["best constant"] < 0.5 * variance["total"]
    assert variance["to go"] < variance["total"]
    assert variance["baseline"] < 0.6 * variance["to go"]


def test_less_variance_per_parameter_on_cartpole(cartpole):
    """Summed over the parameters: no baseline > the best constant > the best for every entry."""
    policy, episodes = cartpole
    rewards, rows = total_reward(episodes)[:, :1], by_hand(policy, episodes, score)
    b = optimal_baseline(log_prob, policy, episodes)
    entries = torch.cat([x.flatten() for x in optimal_baseline(log_prob, policy, episodes, per_param=True).values()])
    none, constant, each = (((rewards - baseline) * rows).var(0).sum() for baseline in (0.0, b, entries))
    assert each < constant < 0.5 * none
