"""Padding never matters: appended steps that are masked change neither value nor gradient, whatever they hold."""

from __future__ import annotations

import inspect

import pytest
import torch
from golden import GOLDEN, OPTIONS, arguments

from persample import losses, per_sample_grads

F64 = torch.float64
MASKED = [golden for golden in GOLDEN if "mask_t" in inspect.signature(getattr(losses, golden.name)).parameters]
EVERY = pytest.mark.parametrize("golden", MASKED, ids=lambda golden: golden.name)
REDUCTIONS = ["sum", "mean", "none"]
CASES = [
    (golden, reduction)
    for golden in MASKED
    for reduction in (
        REDUCTIONS if "reduction" in inspect.signature(getattr(losses, golden.name)).parameters else [None]
    )
]
LOGITS = torch.tensor([[1000.0, -1000.0, 0.0], [-1000.0, 1000.0, 1000.0], [0.5, -1.0, 2.0]], dtype=F64)
A_T = torch.tensor([1, 1, 2])
ADV = torch.tensor([3.0, -0.5, 2.0], dtype=F64)


def time_steps(given):
    """How many there are: all sequences of a case are as long, but for ``values``, which has one entry more."""
    return min(len(x) for x in given.values() if isinstance(x, torch.Tensor) and x.ndim)


def padded(given, extra, junk):
    """Every sequence with ``extra`` more steps of junk, actions of −1."""
    length, longer = time_steps(given), {}
    for name, x in given.items():
        longer[name] = x
        if isinstance(x, torch.Tensor) and x.ndim:
            fill = torch.full((extra, *x.shape[1:]), junk if x.is_floating_point() else -1, dtype=x.dtype)
            longer[name] = torch.cat([x, fill])
    return longer, torch.arange(length + extra) < length


def outputs_and_gradients(name, given, **options):
    result = getattr(losses, name)(**given, **options)
    result = torch.cat(result) if isinstance(result, tuple) else result
    leaves = [x for x in given.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    grads = torch.autograd.grad(result.sum(), leaves, allow_unused=True, materialize_grads=True)
    return result.detach(), grads


def leaves_of(given):
    floating = {name for name, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    return {name: x.detach().requires_grad_() if name in floating else x for name, x in given.items()}


@pytest.mark.parametrize("junk", [0.0, 7.5, torch.nan, torch.inf, -torch.inf], ids="junk={}".format)
@pytest.mark.parametrize("extra", [1, 6])
@pytest.mark.parametrize(("golden", "reduction"), CASES, ids=[f"{golden.name}-{how}" for golden, how in CASES])
def test_appended_steps_change_nothing(golden, reduction, extra, junk):
    options = {} if reduction is None else {"reduction": reduction}
    short = leaves_of(arguments(golden))
    longer, mask_t = padded(arguments(golden), extra, junk)
    value, grads = outputs_and_gradients(golden.name, short, **options)
    other, other_grads = outputs_and_gradients(golden.name, leaves_of(longer), mask_t=mask_t, **options)
    if value.ndim:
        parts = len(other) // len(mask_t)
        other = other.reshape(parts, -1)
        assert torch.equal(other[:, ~mask_t], torch.zeros(parts, extra, dtype=F64))
        other = other[:, mask_t].flatten()
    torch.testing.assert_close(other, value, rtol=0, atol=1e-12)
    for grad, other_grad in zip(grads, other_grads, strict=True):
        rows = len(grad) if grad.ndim else 0
        torch.testing.assert_close(other_grad[:rows] if rows else other_grad, grad, rtol=0, atol=1e-12)
        assert not rows or torch.equal(other_grad[rows:], torch.zeros_like(other_grad[rows:]))


@EVERY
@pytest.mark.parametrize("kind", [torch.float32, torch.int64, torch.uint8], ids=str)
def test_masks_of_numbers_and_of_ones(golden, kind):
    given = arguments(golden)
    mask_t = torch.ones(time_steps(given), dtype=kind)
    value, grads = outputs_and_gradients(golden.name, given)
    other, other_grads = outputs_and_gradients(golden.name, given, mask_t=mask_t)
    assert torch.equal(value, other)
    assert all(map(torch.equal, grads, other_grads))


@EVERY
def test_an_episode_without_steps_is_zero(golden):
    nothing = {name: x for name, x in arguments(golden).items() if name in OPTIONS}
    for name, x in arguments(golden).items():
        if name not in OPTIONS:
            nothing[name] = torch.full_like(x, torch.nan if x.is_floating_point() else -1)
    value, grads = outputs_and_gradients(golden.name, leaves_of(nothing), mask_t=torch.zeros(time_steps(nothing)))
    assert not value.any()
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("engine", ["eager", "loop"])
@EVERY
def test_batches_of_padded_episodes(golden, engine):
    """Episodes of 3, 2, 1 and 0 steps: per-sample gradients as of the episodes by themselves, cut to their length."""
    given = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in arguments(golden).items()}
    options = {name: x for name, x in given.items() if not isinstance(x, torch.Tensor) or not x.ndim}
    rows = {name: x for name, x in given.items() if name not in options}
    steps = time_steps(given)
    lengths = [steps, 2, 1, 0]
    mask = torch.arange(steps) < torch.tensor(lengths)[:, None]

    def loss(scale, rows, mask_t):
        scaled = {name: x * scale if x.is_floating_point() else x for name, x in rows.items()}
        result = getattr(losses, golden.name)(**scaled, **options, mask_t=mask_t)
        return (torch.cat(result) if isinstance(result, tuple) else result).sum()

    batch = {name: torch.stack([x] * 4) for name, x in rows.items()}
    actual = per_sample_grads(loss, torch.tensor(1.0, dtype=F64), (batch, mask), engine=engine)
    for i, length in enumerate(lengths):
        scale = torch.tensor(1.0, dtype=F64, requires_grad=True)
        if length:
            cut = {name: x[: length + (len(x) - steps)] for name, x in rows.items()}
            expected = torch.autograd.grad(loss(scale, cut, torch.ones(length)), scale)[0]
        else:
            expected = torch.zeros((), dtype=F64)
        torch.testing.assert_close(actual[i], expected, rtol=1e-10, atol=1e-12)


def categorical_td(logits):
    return losses.categorical_td_learning(
        ADV.sort()[0].to(logits), logits[0], 0.5, 0.9, ADV.to(logits), logits[1], stop_target_gradients=False
    )


def actor_critic(logits):
    return losses.advantage_actor_critic_loss(logits, torch.zeros(4).to(logits), A_T, ADV.to(logits), 0.9)


BY_LOGITS = {
    "policy_gradient": lambda logits: losses.policy_gradient_loss(logits, A_T, ADV.to(logits)),
    "reinforce": lambda logits: losses.reinforce_loss(logits, A_T, ADV.to(logits)),
    "entropy": losses.entropy_loss,
    "log_prob": lambda logits: losses.categorical_log_prob(logits, A_T).sum(),
    "actor_critic": actor_critic,
    "categorical_td": categorical_td,
}


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("loss", BY_LOGITS.values(), ids=BY_LOGITS)
def test_logits_of_a_thousand_stay_finite(loss, dtype):
    logits = LOGITS.to(dtype).requires_grad_()
    value = loss(logits)
    (grad,) = torch.autograd.grad(value, logits)
    assert value.isfinite()
    assert grad.isfinite().all()
    exact = LOGITS.clone().requires_grad_()
    torch.testing.assert_close(grad.double(), torch.autograd.grad(loss(exact), exact)[0], rtol=1e-5, atol=1e-6)


def test_actions_ruled_out_by_minus_infinity():
    """They add nothing to the entropy, and get no gradient."""
    logits = torch.tensor([[0.3, -torch.inf, -0.2]], dtype=F64, requires_grad=True)
    rest = logits.detach()[:, [0, 2]].requires_grad_()
    for fn in (losses.entropy_loss, lambda x: losses.policy_gradient_loss(x, torch.zeros(1).long(), torch.ones(1))):
        value, expected = fn(logits), fn(rest)
        (grad,), (expected_grad,) = torch.autograd.grad(value, logits), torch.autograd.grad(expected, rest)
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(grad[:, [0, 2]], expected_grad)
        assert grad[0, 1] == 0


def test_retrace_without_an_epsilon():
    """Padding whose behaviour probability is 0 divides nothing by it."""
    q, a_t, r = torch.zeros(2, 2, dtype=F64), torch.zeros(2).long(), torch.ones(2, dtype=F64)
    pi = torch.full((2, 2), 0.5, dtype=F64, requires_grad=True)
    mu = torch.tensor([0.5, 0.0], dtype=F64)
    mask_t = torch.tensor([True, False])
    errors = losses.retrace(q, q + 1, a_t, a_t, r, 0.9, pi, mu, 1.0, 0.0, stop_target_gradients=False, mask_t=mask_t)
    (grad,) = torch.autograd.grad(errors.sum(), pi)
    assert torch.equal(grad, torch.tensor([[0.9, 0.9], [0.0, 0.0]], dtype=F64))


@pytest.mark.parametrize(("golden", "reduction"), CASES, ids=lambda x: getattr(x, "name", x))
def test_no_mask_is_a_mask_of_real_steps(golden, reduction):
    given = leaves_of(arguments(golden))
    options = {} if reduction is None else {"reduction": reduction}
    every = torch.ones(time_steps(given), dtype=torch.bool)
    (value, grads), (masked, masked_grads) = (
        outputs_and_gradients(golden.name, given, **options, **mask) for mask in ({}, {"mask_t": every})
    )
    torch.testing.assert_close(value, masked, rtol=0, atol=0)
    torch.testing.assert_close(grads, masked_grads)


@pytest.mark.parametrize("w_t", [1, 1.0, 0.5, True, torch.tensor(2.0)], ids=repr)
def test_weights_of_any_kind(w_t):
    expected = losses.policy_gradient_loss(LOGITS, A_T, ADV, torch.ones(3, dtype=F64) * torch.as_tensor(w_t))
    torch.testing.assert_close(losses.policy_gradient_loss(LOGITS, A_T, ADV, w_t), expected)


def test_one_distribution_is_one_step():
    logits = LOGITS[2]
    assert losses.entropy_loss(logits, reduction="mean") == losses.entropy_loss(logits[None], reduction="mean")
