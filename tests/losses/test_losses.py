"""Losses and returns against hand-written formulas, RLax's golden values, and what they promise about padding."""

from __future__ import annotations

import math

import pytest
import torch

from persample import ArgumentError, Loss, Mean, per_sample_grads
from persample.losses import discounted_returns, reinforce_loss, stop_gradient, td_learning, td_loss

ENGINES = ["eager", "loop"]
F64 = torch.float64


def draw(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def grads_of(output, inputs):
    """Gradients of the sum of ``output``; None for an input that it does not depend on."""
    return torch.autograd.grad(output.sum(), inputs, allow_unused=True)


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


class TestTD:
    def test_golden_values_of_rlax(self):
        """Source: rlax/_src/value_learning_test.py, TDLearningTest."""
        discount_t = torch.tensor([0.0, 0.5, 1.0] * 3)
        v_t = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0])
        expected = torch.tensor([-2.0, -2.0, -2.0, -2.0, -1.5, -1.0, -2.0, -1.0, 0.0])
        v_tm1, r_t = torch.ones(9), -torch.ones(9)
        assert torch.equal(td_learning(v_tm1, r_t, discount_t, v_t), expected)
        assert torch.equal(torch.vmap(td_learning)(v_tm1, r_t, discount_t, v_t), expected)
        assert torch.equal(td_loss(v_tm1, r_t, discount_t, v_t), expected**2)

    @pytest.mark.parametrize("stop", [True, False], ids=["semi-gradient", "residual"])
    def test_values_do_not_depend_on_the_flag(self, stop):
        v_tm1, r_t, discount_t, v_t = draw(4, 20)
        error = torch.stack([r_t[i] + discount_t[i] * v_t[i] - v_tm1[i] for i in range(20)])
        close(td_learning(v_tm1, r_t, discount_t, v_t, stop), error)
        close(td_loss(v_tm1, r_t, discount_t, v_t, stop), error * error)

    def test_a_number_for_all_is_a_discount(self):
        v_tm1, r_t, v_t = draw(3, 5)
        for fn in (td_learning, td_loss):
            close(fn(v_tm1, r_t, 0.9, v_t), fn(v_tm1, r_t, torch.full((5,), 0.9, dtype=F64), v_t))

    @pytest.mark.parametrize("squared", [False, True], ids=["td_learning", "td_loss"])
    @pytest.mark.parametrize("args", [(), (True,)], ids=["default", "stop"])
    def test_stopped_target_sends_gradient_to_v_tm1_only(self, squared, args):
        inputs = v_tm1, r_t, discount_t, v_t = [x.requires_grad_() for x in draw(4, 6)]
        output = (td_loss if squared else td_learning)(*inputs, *args)
        by_v_tm1, *others = grads_of(output, inputs)
        error = (r_t + discount_t * v_t - v_tm1).detach()
        close(by_v_tm1, -2 * error if squared else -torch.ones(6, dtype=F64))
        assert others == [None, None, None]

    @pytest.mark.parametrize("squared", [False, True], ids=["td_learning", "td_loss"])
    def test_open_target_sends_gradient_to_all_four(self, squared):
        inputs = v_tm1, r_t, discount_t, v_t = [x.requires_grad_() for x in draw(4, 6)]
        output = (td_loss if squared else td_learning)(*inputs, stop_target_gradients=False)
        error = (r_t + discount_t * v_t - v_tm1).detach()
        outer = 2 * error if squared else torch.ones(6, dtype=F64)
        expected = (-outer, outer, outer * v_t.detach(), outer * discount_t.detach())
        for actual, wanted in zip(grads_of(output, inputs), expected, strict=True):
            close(actual, wanted)

    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize("stop", [True, False], ids=["semi-gradient", "residual"])
    def test_per_sample_gradients_of_linear_values(self, stop, engine):
        """−2δ φ(s_tm1), or Baird's residual gradient 2δ (γ φ(s_t) − φ(s_tm1))."""
        theta, s_tm1, s_t, r_t = draw(3), draw(5, 3, seed=1), draw(5, 3, seed=2), draw(5, seed=3)

        def loss(theta, s_tm1, r_t, s_t):
            return td_loss(s_tm1 @ theta, r_t, 0.9, s_t @ theta, stop)

        error = (r_t + 0.9 * s_t @ theta - s_tm1 @ theta)[:, None]
        expected = -2 * error * s_tm1 if stop else 2 * error * (0.9 * s_t - s_tm1)
        close(per_sample_grads(loss, theta, (s_tm1, r_t, s_t), engine=engine), expected)


class TestStopGradient:
    def test_tensors_of_a_tree_become_constants_and_the_rest_passes(self):
        x, y = (x.requires_grad_() for x in draw(2, 3))
        stopped = stop_gradient({"x": x, "more": [x * y, "name", None, 3, torch.tensor(1)]})
        product, *others = stopped["more"]
        assert torch.equal(stopped["x"], x)
        assert torch.equal(product, x * y)
        assert not stopped["x"].requires_grad
        assert not product.requires_grad
        assert others == ["name", None, 3, torch.tensor(1)]

    def test_one_factor_of_a_product(self):
        x = draw(4).requires_grad_()
        (gradient,) = grads_of(x * stop_gradient(x), [x])
        close(gradient, x.detach())

    def test_under_function_transforms(self):
        x = draw(4)
        close(torch.vmap(torch.func.grad(lambda x: x * stop_gradient({"x": x})["x"]))(x), x)


def recursion(r_t, discount_t, v_t):
    """G_t = r_t + γ_t G_{t+1}, from the last step back; as in Sutton, Barto, equation 3.9, with a bootstrap."""
    discounts, total = torch.broadcast_to(torch.as_tensor(discount_t, dtype=r_t.dtype), r_t.shape), v_t
    if isinstance(v_t, torch.Tensor) and v_t.ndim:
        total = v_t[-1]
    returns = []
    for t in reversed(range(len(r_t))):
        total = r_t[t] + discounts[t] * total
        returns.append(total)
    return torch.stack(returns[::-1])


def discounts_with_zeros(length, seed=9):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(length, generator=generator, dtype=F64)
    return torch.where(torch.rand(length, generator=generator) < 0.2, 0, drawn)


DISCOUNTS = {
    "zeros-among-them": discounts_with_zeros,
    "all-zero": lambda length: torch.zeros(length, dtype=F64),
    "all-one": lambda length: torch.ones(length, dtype=F64),
    "negative-too": lambda length: torch.linspace(-0.9, 0.9, length, dtype=F64),
    "number": lambda length: 0.97,
    "0-d": lambda length: torch.tensor(0.5, dtype=F64),
}
BOOTSTRAPS = {
    "v-vector": lambda length: draw(length, seed=1),
    "v-0-d": lambda length: torch.tensor(2.5, dtype=F64),
    "v-number": lambda length: -3.0,
}


class TestDiscountedReturns:
    @pytest.mark.parametrize("form", ["scalar", "vector"])
    def test_golden_values_of_rlax(self, form):
        """Source: rlax/_src/multistep_test.py, DiscountedReturnsTest."""
        r_t = torch.tensor([[1.0, 0.0, -1.0, 0.0, 1.0], [0.5, 0.8, -0.7, 0.0, 2.1]])
        discount_t = torch.tensor([[0.5, 0.9, 1.0, 0.5, 0.8], [0.9, 0.5, 0.3, 0.8, 0.7]])
        v_t = torch.tensor([[3.0, 1.0, 5.0, -5.0, 3.0], [-1.7, 1.2, 2.3, 2.2, 2.7]])
        expected = torch.tensor([[1.315, 0.63, 0.7, 1.7, 3.4], [1.33592, 0.9288, 0.2576, 3.192, 3.99]])
        actual = torch.vmap(discounted_returns)(r_t, discount_t, v_t[:, -1] if form == "scalar" else v_t)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)

    @pytest.mark.parametrize("bootstrap", BOOTSTRAPS)
    @pytest.mark.parametrize("discount", DISCOUNTS)
    @pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 1000])
    def test_equals_the_recursion(self, length, discount, bootstrap):
        arguments = draw(length), DISCOUNTS[discount](length), BOOTSTRAPS[bootstrap](length)
        close(discounted_returns(*arguments), recursion(*arguments), 1e-10)

    def test_float32_over_ten_thousand_steps(self):
        r_t = draw(10_000, dtype=torch.float32)
        actual = discounted_returns(r_t, 0.99, 1.0)
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), recursion(r_t.double(), 0.99, 1.0), rtol=0, atol=1e-4)

    def test_nothing_comes_back_through_a_discount_of_zero(self):
        r_t, later = draw(9), draw(9)
        later[5:] += 1e6
        discount_t = torch.full((9,), 0.9, dtype=F64).index_fill(0, torch.tensor(4), 0)
        before, after = discounted_returns(r_t, discount_t, 1.0), discounted_returns(later, discount_t, -1e6)
        assert torch.equal(before[:5], after[:5])
        assert not torch.isclose(before[5:], after[5:]).any()

    @pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 50])
    def test_gradient_is_that_of_the_recursion(self, length):
        inputs = draw(length), discounts_with_zeros(length), draw(length, seed=1)
        weights = draw(length, seed=2)
        actual, expected = (
            torch.autograd.grad(weights @ returns(*leaves), leaves)
            for returns in (discounted_returns, recursion)
            for leaves in [[x.clone().requires_grad_() for x in inputs]]
        )
        for a, e in zip(actual, expected, strict=True):
            close(a, e, 1e-10)
        assert torch.equal(actual[2][:-1], torch.zeros(length - 1, dtype=F64))  # of v_t only the last one bootstraps

    def test_further_axes_are_elementwise(self):
        r_t, v_t = draw(7, 2), draw(7, 2, seed=1)
        discount_t = torch.stack([discounts_with_zeros(7, seed) for seed in (3, 4)], dim=1)
        columns = [recursion(r_t[:, k], discount_t[:, k], v_t[:, k]) for k in range(2)]
        close(discounted_returns(r_t, discount_t, v_t, time_dim=0), torch.stack(columns, dim=1))

    @pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 0, 0)], ids=str)
    def test_under_vmap(self, dims):
        full = draw(4, 7), torch.stack([discounts_with_zeros(7, seed) for seed in range(4)]), draw(4, 7, seed=1)
        given = [x if dim == 0 else x[0] for x, dim in zip(full, dims, strict=True)]
        rows = [[x[i] if dim == 0 else x for x, dim in zip(given, dims, strict=True)] for i in range(4)]
        expected = torch.stack([recursion(*row) for row in rows])
        close(torch.vmap(discounted_returns, in_dims=dims)(*given), expected)

    @pytest.mark.parametrize("engine", ENGINES)
    def test_gradient_by_the_discount_of_every_episode(self, engine):
        """d/dγ of the first return, Σ_k k γ^{k−1} r_k + T γ^{T−1} v, for rewards r_0 … r_{T−1} and bootstrap v."""
        r_t, gamma, v = draw(5, 6), torch.tensor(0.8, dtype=F64), 2.0
        k = torch.arange(1, 6)
        expected = (k * gamma ** (k - 1) * r_t[:, 1:]).sum(1) + 6 * gamma**5 * v
        actual = per_sample_grads(lambda gamma, r_t: discounted_returns(r_t, gamma, v)[0], gamma, r_t, engine=engine)
        close(actual, expected)


def neglogs_by_hand(logits_t, a_t):
    """−log π(aₜ|sₜ) for every step, with nothing but math."""
    rows, actions = logits_t.tolist(), a_t.tolist()
    return [math.log(sum(map(math.exp, row))) - row[a] for row, a in zip(rows, actions, strict=True)]


def reinforce_by_hand(logits_t, a_t, return_t, mask_t, reduction):
    """The loss and its gradient ∂ℓ/∂logitsₜ = Gₜ (softmax − onehot(aₜ)) at unmasked steps, 0 elsewhere."""
    mask = torch.ones(len(a_t), dtype=torch.bool) if mask_t is None else mask_t
    terms = [nl * g for nl, g in zip(neglogs_by_hand(logits_t, a_t), return_t.tolist(), strict=True)]
    loss_t = torch.tensor([term if m else 0.0 for term, m in zip(terms, mask.tolist(), strict=True)], dtype=F64)
    onehot = torch.eye(logits_t.shape[1], dtype=F64)[a_t]
    grad = (return_t * mask)[:, None] * (logits_t.exp() / logits_t.exp().sum(1, keepdim=True) - onehot)
    if reduction == "mean":
        return loss_t.sum() / mask.sum(), grad / mask.sum()
    return (loss_t if reduction == "none" else loss_t.sum()), grad


def episode(length=6, actions=3, seed=0):
    a_t = torch.randint(actions, (length,), generator=torch.Generator().manual_seed(seed))
    return draw(length, actions, seed=seed), a_t, draw(length, seed=seed + 1)


def loss_and_grad(logits_t, *args, **kwargs):
    logits_t = logits_t.clone().requires_grad_()
    loss = reinforce_loss(logits_t, *args, **kwargs)
    return loss.detach(), grads_of(loss, [logits_t])[0]


REDUCTIONS = ["sum", "mean", "none"]
MASK = torch.tensor([True, True, False, True, False, False])


class TestReinforce:
    def test_golden_values_of_rlax(self):
        """Source: rlax/_src/policy_gradients_test.py, PolicyGradientLossTest: a mean, with adv·w as the return."""
        logits = torch.tensor([[1.0, 1.0, 1.0], [2.0, 0.0, 0.0], [-1.0, -2.0, -3.0]])
        logits = torch.stack([logits, logits + 1])
        weights = torch.tensor([[-2.0, 2.0, 0.0], [-3.0, 1.0, -1.0]])
        advantages = torch.tensor([[0.3, 0.2, 0.1], [-0.3, -0.2, -0.1]])
        actions = torch.tensor([[0, 1, 2], [0, 0, 0]])
        actual = torch.vmap(lambda *args: reinforce_loss(*args, reduction="mean"))(
            logits, actions, advantages * weights
        )
        torch.testing.assert_close(actual, torch.tensor([0.0788835088, 0.327200909]), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("mask_t", [None, MASK, ~MASK], ids=["unmasked", "mask", "mask-first-too"])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_value_and_gradient_by_hand(self, reduction, mask_t):
        logits_t, a_t, return_t = episode()
        loss, grad = loss_and_grad(logits_t, a_t, return_t, mask_t, reduction=reduction)
        expected_loss, expected_grad = reinforce_by_hand(logits_t, a_t, return_t, mask_t, reduction)
        close(loss, expected_loss)
        close(grad, expected_grad)

    def test_the_default_is_the_sum(self):
        arguments = *episode(), MASK
        assert torch.equal(reinforce_loss(*arguments), reinforce_loss(*arguments, reduction="sum"))
        assert not torch.isclose(reinforce_loss(*arguments), reinforce_loss(*arguments, reduction="mean"))

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("logit", [torch.nan, torch.inf, -torch.inf, 1e300], ids="logit={}".format)
    @pytest.mark.parametrize("value", [torch.nan, torch.inf], ids="return={}".format)
    @pytest.mark.parametrize("action", [-1, 99], ids="action={}".format)
    def test_padding_counts_exactly_zero_whatever_it_holds(self, action, value, logit, reduction):
        logits_t, a_t, return_t = episode()
        clean = loss_and_grad(logits_t, a_t, return_t, MASK, reduction=reduction)
        dirty = loss_and_grad(
            torch.where(MASK[:, None], logits_t, logit),
            torch.where(MASK, a_t, action),
            torch.where(MASK, return_t, value),
            MASK,
            reduction=reduction,
        )
        assert torch.equal(dirty[0], clean[0])
        assert torch.equal(dirty[1], clean[1])
        assert torch.equal(dirty[1][~MASK], torch.zeros(3, 3, dtype=F64))
        assert (dirty[1][MASK] != 0).all()

    @pytest.mark.parametrize("extra", [1, 5, 64])
    @pytest.mark.parametrize("reduction", ["sum", "mean"])
    def test_appended_padding_changes_nothing(self, reduction, extra):
        logits_t, a_t, return_t = episode()
        short = loss_and_grad(logits_t, a_t, return_t, reduction=reduction)
        long = loss_and_grad(
            torch.cat([logits_t, torch.full((extra, 3), torch.nan, dtype=F64)]),
            torch.cat([a_t, torch.full((extra,), -1)]),
            torch.cat([return_t, torch.full((extra,), torch.nan, dtype=F64)]),
            torch.arange(6 + extra) < 6,
            reduction=reduction,
        )
        close(long[0], short[0])
        close(long[1][:6], short[1])
        assert torch.equal(long[1][6:], torch.zeros(extra, 3, dtype=F64))

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_an_episode_without_steps_is_zero_not_nan(self, reduction):
        nothing = (
            torch.full((4, 3), torch.nan),
            torch.full((4,), -1),
            torch.full((4,), torch.nan),
            torch.zeros(4).bool(),
        )
        loss, grad = loss_and_grad(*nothing, reduction=reduction)
        assert torch.equal(loss, torch.zeros(4 if reduction == "none" else ()))
        assert torch.equal(grad, torch.zeros(4, 3))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8], ids=str)
    def test_masks_of_numbers(self, dtype):
        arguments = episode()
        for a, e in zip(loss_and_grad(*arguments, MASK.to(dtype)), loss_and_grad(*arguments, MASK), strict=True):
            assert torch.equal(a, e)

    def test_small_integer_actions(self):
        logits_t, a_t, return_t = episode()
        assert torch.equal(
            reinforce_loss(logits_t, a_t.to(torch.int8), return_t), reinforce_loss(logits_t, a_t, return_t)
        )

    @pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
    def test_logits_of_a_thousand_stay_finite(self, dtype):
        """−log π is 0 for the certain action and 2000 for the impossible one; the gradient is G (softmax − onehot)."""
        logits_t = torch.tensor([[1000.0, -1000.0], [1000.0, -1000.0]], dtype=dtype)
        loss, grad = loss_and_grad(logits_t, torch.tensor([0, 1]), torch.tensor([3.0, 0.5], dtype=dtype))
        close(loss, torch.tensor(1000.0, dtype=dtype))
        close(grad, torch.tensor([[0.0, 0.0], [0.5, -0.5]], dtype=dtype))

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_no_gradient_through_the_returns(self, reduction):
        logits_t, a_t, return_t = (x.requires_grad_() if x.is_floating_point() else x for x in episode())
        loss = reinforce_loss(logits_t, a_t, return_t, MASK, reduction=reduction)
        by_logits, by_return = grads_of(loss, [logits_t, return_t])
        assert by_return is None
        assert by_logits.any()

    def test_returns_computed_from_the_policy_are_constants(self):
        logits_t, a_t, _ = episode()
        leaf = logits_t.clone().requires_grad_()
        (grad,) = grads_of(reinforce_loss(leaf, a_t, (leaf**2).sum(1)), [leaf])
        assert torch.equal(grad, loss_and_grad(logits_t, a_t, (logits_t**2).sum(1))[1])

    def test_an_unknown_reduction_is_refused(self):
        with pytest.raises(ArgumentError, match=r"reduction: expected 'sum', 'mean' or 'none', received 'avg'. .*sum"):
            reinforce_loss(*episode(), reduction="avg")

    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize("reduction", ["sum", "mean"])
    def test_padded_episodes_per_sample_equal_the_unpadded_ones(self, reduction, engine):
        """Episodes of 6, 1, 4 and 0 steps under a linear policy; padding holds NaN returns and actions of −1."""
        lengths, weight = torch.tensor([6, 1, 4, 0]), draw(3, 2, seed=5)
        mask_t = torch.arange(6) < lengths[:, None]
        obs_t = draw(4, 6, 2, seed=6)
        a_t = torch.where(mask_t, torch.randint(3, (4, 6), generator=torch.Generator().manual_seed(7)), -1)
        return_t = torch.where(mask_t, draw(4, 6, seed=8), torch.nan)

        def loss(weight, obs_t, a_t, return_t, mask_t):
            return reinforce_loss(obs_t @ weight.T, a_t, return_t, mask_t, reduction=reduction)

        expected_losses, expected_grads = [], []
        for i, length in enumerate(lengths.tolist()):
            pieces = obs_t[i, :length] @ weight.T, a_t[i, :length], return_t[i, :length]
            value, by_logits = torch.zeros((), dtype=F64), torch.zeros(0, 3, dtype=F64)
            if length:
                value, by_logits = reinforce_by_hand(*pieces, None, reduction)
            expected_losses.append(value)
            expected_grads.append(by_logits.T @ obs_t[i, :length])
        wanted = {"losses": Loss(), "grads": None, "mean": Mean()}
        result = per_sample_grads(loss, weight, (obs_t, a_t, return_t, mask_t), wanted, engine=engine)
        close(result["losses"], torch.stack(expected_losses))
        close(result["grads"], torch.stack(expected_grads))
        close(result["mean"], torch.stack(expected_grads).mean(0))


def test_one_discount_per_step_of_several_episodes_is_ambiguous():
    """Of a square batch, nobody can tell discounts of steps from those of episodes."""
    r_t, discount_t = torch.tensor([[0.0, 1.0], [2.0, 3.0]]), torch.tensor([0.5, 0.5])
    with pytest.raises(ArgumentError, match=r"discount_t: expected a number or shape \[2, 2\], as of r_t"):
        discounted_returns(r_t, discount_t, 4.0, time_dim=0)
    assert discounted_returns(r_t, 0.5, 4.0, time_dim=0).tolist() == [[2.0, 3.5], [4.0, 5.0]]
