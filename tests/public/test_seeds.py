"""The documents that the project grew from, with their numbers (rows 0, 1, 2 and 4 of the list of seeds).

Row 3 is in ``test_seeds_composite.py``.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from live_bytes import LiveBytes
from torch import nn

from persample import Loss, Mean, losses, per_sample_grads, stop_gradient
from persample.naive import backward_each, stack_mean_backward
from persample.utils.measure import peak_memory

F64 = torch.float64
ENGINES = ["eager", "traced", "compiled", "loop"]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_live_bytes_see_what_is_kept_and_what_is_freed():
    """The proof that the measurement can fail: exp saves its 8-byte result, once per live graph."""
    x = torch.zeros((), dtype=F64, requires_grad=True)
    assert LiveBytes().measure(lambda: [x.exp() for _ in range(4)]) == 32
    assert LiveBytes().measure(lambda: [x.exp().backward() for _ in range(4)]) == 8


class TestListOfLosses:
    """Row 0: REINFORCE with one loss per episode, and the average of their gradients."""

    @staticmethod
    def setup_episodes(n, length=10):
        torch.manual_seed(0)
        policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).double()
        returns = losses.discounted_returns(draw(length, n, seed=2).T, 0.9, 0.0, time_dim=1)
        return policy, (draw(n, length, 4), torch.randint(3, (n, length)), returns)

    @staticmethod
    def loss(policy, obs_t, a_t, return_t):
        return losses.reinforce_loss(policy(obs_t), a_t, return_t)

    def losses(self, policy, batch):
        return (self.loss(policy, *sample) for sample in zip(*batch, strict=True))

    def test_three_ways_to_the_same_update(self):
        policy, batch = self.setup_episodes(6)
        params = dict(policy.named_parameters())
        torch.stack(list(self.losses(policy, batch))).mean().backward()
        expected = {name: p.grad for name, p in params.items()}
        ways = {
            "stack": stack_mean_backward(list(self.losses(policy, batch)), params),
            "each of a list": backward_each(list(self.losses(policy, batch)), params),
            "each of a generator": backward_each(self.losses(policy, batch), params, n=6),
            **{engine: per_sample_grads(self.loss, policy, batch, Mean(), engine=engine) for engine in ENGINES},
        }
        assert all(grad.abs().max() > 1e-3 for grad in expected.values())
        for update in ways.values():
            close(update, expected)

    def peaks(self, work):
        """Peak bytes for 8 and for 32 episodes."""
        peaks = []
        for n in (8, 32):
            policy, batch = self.setup_episodes(n)
            params = dict(policy.named_parameters())
            peaks.append(LiveBytes().measure(lambda p=policy, b=batch, t=params, n=n: work(p, b, t, n)))
        return peaks

    def test_stacking_keeps_every_graph_alive(self):
        few, many = self.peaks(lambda policy, batch, params, _: stack_mean_backward(self.losses(policy, batch), params))
        assert 3.9 * few < many < 4.1 * few

    @pytest.mark.parametrize("retain", [False, True], ids=["freed", "retained"])
    def test_a_backward_for_each_keeps_one(self, retain):
        few, many = self.peaks(
            lambda policy, batch, params, n: backward_each(self.losses(policy, batch), params, n, retain_graph=retain)
        )
        policy, batch = self.setup_episodes(1)
        one = LiveBytes().measure(lambda: list(self.losses(policy, batch)))
        assert few == many
        assert one <= few < 1.1 * one  # loss / n is one number more

    def test_a_list_was_built_before_it_is_given(self):
        stack, _ = self.peaks(lambda policy, batch, params, _: stack_mean_backward(self.losses(policy, batch), params))
        each, _ = self.peaks(lambda policy, batch, params, _: backward_each(list(self.losses(policy, batch)), params))
        assert 0.9 * stack < each < 1.1 * stack

    def test_the_three_side_by_side(self):
        """Bytes allocated at the peak, results included: the stack grows with the list, the other two do not."""
        peaks = {}
        for n in (8, 32):
            policy, batch = self.setup_episodes(n, length=50)
            params = dict(policy.named_parameters())
            peaks[n] = (
                peak_memory(lambda p=policy, b=batch, t=params: stack_mean_backward(self.losses(p, b), t)),
                peak_memory(lambda p=policy, b=batch, t=params, n=n: backward_each(self.losses(p, b), t, n)),
                peak_memory(lambda p=policy, b=batch: per_sample_grads(self.loss, p, b, Mean(), chunk_size=4)),
            )
        stack, each, chunks = (many / few for few, many in zip(peaks[8], peaks[32], strict=True))
        assert stack > 3
        assert each == 1
        assert chunks < 1.1
        assert peaks[32][1] < peaks[32][2] < peaks[32][0]


class TestBookChapter:
    """Row 1: v1 = [1, 1] with a gradient, v2 = [2, 2] without, v_res = Σ 2(v1 + v2)."""

    def test_plain_autograd(self):
        v1, v2 = torch.tensor([1.0, 1.0], requires_grad=True), torch.tensor([2.0, 2.0])
        v_res = (2 * (v1 + v2)).sum()
        v_res.backward()
        assert v_res == 12
        assert v1.grad.tolist() == [2, 2]
        assert v2.grad is None
        assert v1.is_leaf
        assert not v_res.is_leaf

    @pytest.mark.parametrize("engine", ENGINES)
    def test_the_same_as_a_batch_of_one(self, engine):
        v1, v2 = torch.tensor([1.0, 1.0], requires_grad=True), torch.tensor([[2.0, 2.0]])
        wanted = {"grads": None, "v_res": Loss()}
        result = per_sample_grads(lambda v1, v2: (2 * (v1 + v2)).sum(), v1, v2, wanted, engine=engine)
        assert result["v_res"].tolist() == [12]
        assert result["grads"].tolist() == [[2, 2]]
        assert v1.grad is None
        assert v2.grad is None


THETA = torch.tensor([0.2, -0.2, 0.1])
S_TM1, R_T, S_T = torch.tensor([2.0, 1.0, -2.0]), torch.tensor(2.0), torch.tensor([1.0, 2.0, 0.0])
CORRECT, SLIP = torch.tensor([-7.2, -3.6, 7.2]), torch.tensor([-4.0, -8.0, 0.0])


def value(theta, state):
    return theta @ state


def td_loss(theta, s_tm1, r_t, s_t):
    """The squared TD error with a stopped target, as the tutorial means it: v at s_tm1 against r + v at s_t."""
    return (stop_gradient(r_t + value(theta, s_t)) - value(theta, s_tm1)) ** 2


def library_td_loss(theta, s_tm1, r_t, s_t):
    return losses.td_loss(value(theta, s_tm1), r_t, 1.0, value(theta, s_t))


def tutorial_td_loss(theta):
    """The tutorial's slip: the loss closes over the transition, and evaluates v at s_{t+1} on both sides."""
    v_tm1 = value(theta, S_T)  # should be S_TM1
    return (stop_gradient(R_T + value(theta, S_T)) - v_tm1) ** 2


@pytest.mark.parametrize("engine", ENGINES)
class TestTutorial:
    """Row 2: per-sample gradients of TD(0)."""

    @pytest.mark.parametrize("loss", [td_loss, library_td_loss], ids=["by-hand", "persample.losses"])
    @pytest.mark.parametrize(
        ("batched", "in_dims"),
        [
            ("theta", (0, None)),
            ("theta", (0, (None, None, None))),
            ("all", (0, 0)),
            ("transitions", (None, 0)),
            ("transitions", (None, (0, 0, 0))),
        ],
        ids=lambda x: str(x).replace(" ", ""),
    )
    def test_the_correct_gradient(self, loss, batched, in_dims, engine):
        theta = THETA.repeat(5, 1) if batched in ("theta", "all") else THETA
        batch = (S_TM1, R_T, S_T)
        if batched in ("transitions", "all"):
            batch = tuple(torch.stack([x] * 5) for x in batch)
        grads = per_sample_grads(loss, theta, batch, in_dims=in_dims, engine=engine)
        torch.testing.assert_close(grads, CORRECT.repeat(5, 1))

    @pytest.mark.parametrize("in_dims", [(0, None), (0, 0)], ids=str)
    def test_the_slip(self, in_dims, engine):
        grads = per_sample_grads(tutorial_td_loss, THETA.repeat(5, 1), (), in_dims=in_dims, engine=engine)
        torch.testing.assert_close(grads, SLIP.repeat(5, 1))

    def test_the_slip_is_the_states_not_the_closing_over(self, engine):
        """The same closure with v_tm1 at s_t, and the td loss at (s_{t+1}, s_{t+1}), tell the cause apart."""
        right = per_sample_grads(
            lambda theta: td_loss(theta, S_TM1, R_T, S_T), THETA[None], (), in_dims=(0, 0), engine=engine
        )
        wrong = per_sample_grads(td_loss, THETA, (S_T[None], R_T[None], S_T[None]), engine=engine)
        torch.testing.assert_close(right, CORRECT[None])
        torch.testing.assert_close(wrong, SLIP[None])


def rows_of_regression(n=50):
    """y = 2x − 1 and noise: NumPy arrays x, y, and the pseudo-inverse solution [a, b]."""
    x = draw(n).numpy()
    y = 2 * x - 1 + 0.3 * draw(n, seed=1).numpy()
    return x, y, np.linalg.pinv(np.stack([x, np.ones(n)], axis=1)) @ y


def squared_error(theta, x, y):
    return (theta["a"] * x + theta["b"] - y) ** 2


class TestCourseNotes:
    """Row 4: least squares three ways, scaled gradients, and the stop-gradient."""

    @pytest.mark.parametrize("engine", ENGINES)
    def test_hand_written_gradients_are_autograd_and_the_mean_of_per_sample_ones(self, engine):
        x, y, _ = rows_of_regression()
        a, b = 0.3, -0.2
        error = a * x + b - y
        by_hand = {"a": np.mean(2 * error * x), "b": np.mean(2 * error)}

        leaves = {name: torch.tensor(v, dtype=F64, requires_grad=True) for name, v in (("a", a), ("b", b))}
        squared_error(leaves, torch.from_numpy(x), torch.from_numpy(y)).mean().backward()
        rows = per_sample_grads(squared_error, leaves, (x, y), engine=engine)
        mean = per_sample_grads(squared_error, leaves, (x, y), Mean(), engine=engine)

        np.testing.assert_allclose(rows["a"], 2 * error * x, rtol=1e-12)
        np.testing.assert_allclose(rows["b"], 2 * error, rtol=1e-12)
        for name, expected in by_hand.items():
            np.testing.assert_allclose(leaves[name].grad, expected, rtol=1e-12)
            np.testing.assert_allclose(rows[name].mean(), expected, rtol=1e-12)
            np.testing.assert_allclose(mean[name], expected, rtol=1e-12)

    @pytest.mark.parametrize("engine", ENGINES)
    def test_gradient_descent_reaches_the_pseudo_inverse_solution(self, engine):
        x, y, solution = rows_of_regression(20)
        theta = {"a": torch.zeros((), dtype=F64), "b": torch.zeros((), dtype=F64)}
        for _ in range(60):
            update = per_sample_grads(squared_error, theta, (x, y), Mean(), engine=engine)
            theta = {name: theta[name] - 0.4 * update[name] for name in theta}
        np.testing.assert_allclose([theta["a"], theta["b"]], solution, rtol=1e-8)

    @pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam], ids=["SGD", "Adam"])
    def test_an_optimizer_reaches_it_too(self, optimizer):
        x, y, solution = rows_of_regression(20)
        theta = {name: torch.zeros((), dtype=F64, requires_grad=True) for name in "ab"}
        stepper = optimizer(theta.values(), lr=0.3)
        for _ in range(150):
            update = per_sample_grads(squared_error, theta, (x, y), Mean())
            for name, leaf in theta.items():
                leaf.grad = update[name]
            stepper.step()
        np.testing.assert_allclose([theta["a"].item(), theta["b"].item()], solution, rtol=1e-3)

    @staticmethod
    def f(theta, x):
        return torch.tanh(theta @ x)

    @staticmethod
    def g(theta, x):
        return torch.exp(-((theta @ x) ** 2))

    @pytest.mark.parametrize("engine", ENGINES)
    def test_stopped_g_scales_every_gradient_of_f(self, engine):
        theta, x = draw(3), draw(8, 3, seed=1)
        scaled = per_sample_grads(
            lambda theta, x: stop_gradient(self.g(theta, x)) * self.f(theta, x), theta, x, engine=engine
        )
        by_rows = self.g(theta, x.T)[:, None] * per_sample_grads(self.f, theta, x, engine=engine)
        u = (x @ theta)[:, None]
        close(scaled, by_rows)
        close(scaled, torch.exp(-(u**2)) * (1 - torch.tanh(u) ** 2) * x)

    @pytest.mark.parametrize("engine", ENGINES)
    def test_without_the_stop_it_differs_by_f_times_the_gradient_of_g(self, engine):
        theta, x = draw(3), draw(8, 3, seed=1)
        full = per_sample_grads(lambda theta, x: self.g(theta, x) * self.f(theta, x), theta, x, engine=engine)
        stopped = per_sample_grads(
            lambda theta, x: stop_gradient(self.g(theta, x)) * self.f(theta, x), theta, x, engine=engine
        )
        u = (x @ theta)[:, None]
        close(full - stopped, torch.tanh(u) * (-2 * u * torch.exp(-(u**2)) * x))
        assert (full - stopped).abs().max() > 0.1
