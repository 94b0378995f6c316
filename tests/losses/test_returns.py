"""Returns and advantages against their recursive definitions, one step at a time in plain Python."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from persample import ArgumentError, Mean, per_sample_grads
from persample.losses import (
    discounted_returns,
    lambda_returns,
    n_step_bootstrapped_returns,
    truncated_generalized_advantage_estimation,
    vtrace_td_error_and_advantage,
)

F64 = torch.float64
N_STEPS = [1, 2, 3, 5, 8, 1000]


def draw(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def uniform(length, seed, zeros=0.0):
    """Numbers from 0 to 1, a share of them exactly 0: episodes that end inside."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(length, generator=generator, dtype=F64)
    return torch.where(torch.rand(length, generator=generator) < zeros, 0, drawn)


def trajectory(length, zeros=0.2):
    """Rewards, discounts, λ, and values at times 0 … T."""
    return draw(length), uniform(length, 1, zeros), uniform(length, 2), draw(length + 1, seed=3)


def recursive_lambda(r_t, discount_t, v_t, lambda_):
    following, returns = v_t[-1], []
    for r, discount, v, mixing in reversed(list(zip(r_t, discount_t, v_t, lambda_, strict=True))):
        following = r + discount * ((1 - mixing) * v + mixing * following)
        returns.append(following)
    return torch.stack(returns[::-1])


def recursive_n_step(r_t, discount_t, v_t, n, lambda_):
    returns = []
    for t in range(len(r_t)):
        stop = min(t + n, len(r_t))
        returns.append(recursive_lambda(r_t[t:stop], discount_t[t:stop], v_t[t:stop], lambda_[t:stop])[0])
    return torch.stack(returns)


def recursive_advantages(r_t, discount_t, lambda_, values):
    following, advantages = 0.0, []
    for t in reversed(range(len(r_t))):
        delta = r_t[t] + discount_t[t] * values[t + 1] - values[t]
        following = delta + discount_t[t] * lambda_[t] * following
        advantages.append(following)
    return torch.stack(advantages[::-1])


def pairs(length, zeros=0.2, n=3):
    """Every function with its arguments and its definition."""
    r, discounts, mixing, values = trajectory(length, zeros)
    v, ones = values[1:], torch.ones(length, dtype=F64)
    return {
        "discounted": (discounted_returns, (r, discounts, v), lambda r, d, v: recursive_lambda(r, d, v, ones)),
        "lambda": (lambda_returns, (r, discounts, v, mixing), recursive_lambda),
        "n-step": (
            lambda r, d, v, m, **kwargs: n_step_bootstrapped_returns(r, d, v, n, m, **kwargs),
            (r, discounts, v, mixing),
            lambda r, d, v, m: recursive_n_step(r, d, v, n, m),
        ),
        "advantages": (
            truncated_generalized_advantage_estimation,
            (r, discounts, mixing, values),
            recursive_advantages,
        ),
    }


KINDS = pytest.mark.parametrize("kind", ["discounted", "lambda", "n-step", "advantages"])


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@KINDS
@pytest.mark.parametrize("zeros", [0.0, 0.2, 1.0], ids=["no-ends", "ends-inside", "all-ends"])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 500])
def test_equals_the_recursion(length, zeros, kind):
    fn, arguments, definition = pairs(length, zeros)[kind]
    close(fn(*arguments), definition(*arguments))


@pytest.mark.parametrize("n", N_STEPS)
@pytest.mark.parametrize("length", [1, 4, 9])
def test_n_steps(length, n):
    r, discounts, mixing, values = trajectory(length)
    expected = recursive_n_step(r, discounts, values[1:], n, mixing)
    close(n_step_bootstrapped_returns(r, discounts, values[1:], n, mixing), expected)
    plain = recursive_n_step(r, discounts, values[1:], n, torch.ones(length, dtype=F64))
    close(n_step_bootstrapped_returns(r, discounts, values[1:], n), plain)


@KINDS
def test_float32_over_ten_thousand_steps(kind):
    """Long episodes of discount 1, which end only now and then: returns of several hundred."""
    length, ends = 10_000, torch.arange(10_000) % 3000 == 2999
    r, values = torch.rand(length, generator=torch.Generator().manual_seed(0)), draw(length + 1, dtype=torch.float32)
    discounts, mixing = torch.where(ends, 0.0, 1.0), torch.full((length,), 0.9993)
    arguments = {
        "discounted": (r, discounts, values[1:]),
        "advantages": (r, discounts, mixing, values),
    }.get(kind, (r, discounts, values[1:], mixing))
    fn, _, definition = pairs(length, n=5000)[kind]
    if kind == "n-step":  # its definition takes T·n steps; past the ends of episodes λ-returns see the same
        arguments = (r, torch.where(torch.arange(length) % 2500 == 2499, 0.0, discounts), *arguments[2:])
        definition = recursive_lambda
    actual = fn(*arguments)
    assert actual.dtype == torch.float32
    assert actual.abs().max() > 400
    close(actual.double(), definition(*(x.double() for x in arguments)), 1e-4)


@KINDS
@pytest.mark.parametrize("length", [1, 5, 8])
def test_gradients_are_those_of_the_recursion(length, kind):
    fn, arguments, definition = pairs(length)[kind]
    weights = draw(length, seed=5)
    found = []
    for function in (fn, definition):
        leaves = [x.clone().requires_grad_() for x in arguments]
        found.append(
            torch.autograd.grad(weights @ function(*leaves), leaves, allow_unused=True, materialize_grads=True)
        )
    for actual, expected in zip(*found, strict=True):
        close(actual, expected)


@KINDS
@pytest.mark.parametrize("length", [1, 3, 9])  # 3 steps of 3 episodes: shapes alone do not tell the axes apart
def test_under_vmap_and_with_further_axes(kind, length):
    fn, arguments, definition = pairs(length)[kind]
    rows = [torch.stack([x, x.flip(0), x * 0.5]) for x in arguments]
    expected = torch.stack([definition(*row) for row in zip(*rows, strict=True)])
    close(torch.vmap(fn)(*rows), expected)
    for axis in (1, -1):
        close(fn(*rows, time_dim=axis), expected)
    close(fn(*(x.T for x in rows), time_dim=0), expected.T)
    between = [torch.stack([x, 2 * x]).movedim(2, 1) for x in rows]  # [2, T, 3]
    twice = torch.stack([torch.stack([definition(*row) for row in zip(*more, strict=True)])
                         for more in (rows, [2 * x for x in rows])])  # fmt: skip
    close(fn(*between, time_dim=1), twice.movedim(2, 1))


@KINDS
def test_several_axes_without_the_axis_of_time(kind):
    fn, arguments, _ = pairs(4)[kind]
    rows = [torch.stack([x, x]) for x in arguments]
    with pytest.raises(ArgumentError, match=r"r_t: expected shape \[T\], received shape \[2, 4\]\. .*time_dim=1 for"):
        fn(*rows)
    with pytest.raises(ArgumentError, match=r"time_dim: expected an axis of r_t, from -2 to 1, received 2"):
        fn(*rows, time_dim=2)
    with pytest.raises(ArgumentError, match=r"time_dim: expected an axis of r_t, from -1 to 0, received True"):
        fn(*arguments, time_dim=True)


@KINDS
def test_padded_episodes_as_rows(kind):
    """Each row of [E, T] with a mask is its own episode."""
    fn, arguments, _ = pairs(6)[kind]
    rows, mask = [torch.stack([x, x]) for x in arguments], torch.arange(6) < torch.tensor([[6], [4]])
    alone = torch.stack([fn(*(x[i] for x in rows), mask_t=mask[i]) for i in range(2)])
    assert torch.equal(fn(*rows, mask_t=mask, time_dim=1), alone)
    assert (fn(*rows, mask_t=mask, time_dim=1)[1, 4:] == 0).all()


@KINDS
def test_masked_steps_end_what_is_before_them(kind):
    """Three episodes in one row, with padding between and around them, NaN or ∞ throughout."""
    lengths, mask = [4, 1, 6], torch.zeros(17, dtype=torch.bool)
    fn, _, definition = pairs(1)[kind]
    starts, expected = [2, 7, 10], torch.zeros(17, dtype=F64)
    count = 3 if kind == "discounted" else 4
    padded = [torch.full((18 if kind == "advantages" and i == 3 else 17,), torch.nan, dtype=F64) for i in range(count)]
    padded[0][0] = torch.inf
    for start, length in zip(starts, lengths, strict=True):
        _, arguments, definition = pairs(length, zeros=0.0)[kind]
        for row, x in zip(padded, arguments, strict=True):
            row[start : start + len(x)] = x
        mask[start : start + length] = True
        expected[start : start + length] = definition(*arguments)
    actual = fn(*padded, mask_t=mask)
    close(actual, expected, 1e-12)
    assert torch.equal(actual[~mask], torch.zeros(6, dtype=F64))


@KINDS
@pytest.mark.parametrize("stop", [False, True])
def test_the_flag_stops_all_gradients(kind, stop):
    fn, arguments, _ = pairs(5)[kind]
    leaves = [x.clone().requires_grad_() for x in arguments]
    assert fn(*leaves, stop_target_gradients=stop).requires_grad is not stop


class Counting(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@KINDS
def test_operations_grow_with_the_logarithm_of_time(kind):
    """Doubling T adds a round of doubling, the same number of operations each time."""
    counts = []
    for length in (256, 512, 1024, 2048):
        fn, arguments, _ = pairs(length, n=length)[kind]
        with Counting() as counting:
            torch.vmap(fn)(*(x[None] for x in arguments))
        counts.append(counting.calls)
    steps = {later - earlier for earlier, later in itertools.pairwise(counts)}
    assert len(steps) == 1
    assert steps.pop() < 20
    assert counts[-1] < 250


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_per_sample_gradients_through_the_returns(engine):
    """A value network is differentiated through its own λ-returns: padded episodes as one by one."""
    theta, obs, lengths = draw(3), draw(4, 7, 3, seed=1), torch.tensor([7, 1, 4, 6])
    r, discounts = draw(4, 7, seed=2), torch.rand(4, 7, generator=torch.Generator().manual_seed(3), dtype=F64)
    mask = torch.arange(7) < lengths[:, None]

    def loss(theta, obs, r, discounts, mask):
        return lambda_returns(r, discounts, obs @ theta, 0.7, mask_t=mask).sum()

    expected = []
    for i, length in enumerate(lengths.tolist()):
        leaf = theta.clone().requires_grad_()
        mixing = torch.full((length,), 0.7, dtype=F64)
        value = recursive_lambda(r[i, :length], discounts[i, :length], obs[i, :length] @ leaf, mixing).sum()
        expected.append(torch.autograd.grad(value, leaf)[0])
    actual = per_sample_grads(loss, theta, (obs, r, discounts, mask), {"rows": None, "mean": Mean()}, engine=engine)
    close(actual["rows"], torch.stack(expected))
    close(actual["mean"], torch.stack(expected).mean(0))


def test_no_steps_no_returns():
    empty = torch.zeros(0)
    assert discounted_returns(empty, 0.9, 1.0).shape == (0,)
    assert lambda_returns(empty, 0.9, empty, 0.5).shape == (0,)
    assert n_step_bootstrapped_returns(empty, 0.9, empty, 2).shape == (0,)
    assert truncated_generalized_advantage_estimation(empty, 0.9, 0.5, torch.zeros(1)).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64], ids=str)
def test_other_dtypes_keep_theirs_and_lose_nothing_inside(dtype):
    """300 rewards of 1: half precision alone would stop counting at 256 (bfloat16)."""
    returns = discounted_returns(torch.ones(300).to(dtype), torch.ones(300).to(dtype), 0)
    assert returns.dtype == dtype
    assert torch.equal(returns, torch.arange(300, 0, -1).to(dtype))


def test_vtrace_of_episodes_as_rows():
    v_tm1, v_t, r, rho = (*draw(3, 3, 3), draw(3, 3, seed=1).exp())
    alone = [
        torch.stack(x) for x in zip(*map(vtrace_td_error_and_advantage, v_tm1, v_t, r, [0.9] * 3, rho), strict=True)
    ]
    rows = vtrace_td_error_and_advantage(v_tm1, v_t, r, 0.9, rho, time_dim=1)
    columns = vtrace_td_error_and_advantage(v_tm1.T, v_t.T, r.T, 0.9, rho.T, time_dim=0)
    for actual, transposed, expected in zip(rows, columns, alone, strict=True):
        close(actual, expected)
        close(transposed.T, expected)
