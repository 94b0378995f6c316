"""Every loss against RLax: value, and which arguments receive what gradient, in both states of its flag."""

from __future__ import annotations

import inspect

import pytest
import torch
from golden import GOLDEN, SIGNATURES, arguments

from persample import losses

F64 = torch.float64
STATES = [(golden, state) for golden in GOLDEN for state in ((True, False) if golden.flag else (None,))]
IDS = [f"{golden.name}-{state}" for golden, state in STATES]


def call(golden, state, given):
    fn = getattr(losses, golden.name)
    options = {} if state is None else {golden.flag: state}
    if "reduction" in inspect.signature(fn).parameters:
        options["reduction"] = "mean"
    result = fn(**given, **options)
    return torch.cat(result) if isinstance(result, tuple) else result


def gradients(golden, state, given):
    """Of Σₖ k·outputₖ, by name; arguments without any gradient are left out."""
    output = call(golden, state, given)
    k = torch.arange(1, 1 + output.numel(), dtype=output.dtype).reshape(output.shape)
    leaves = {name: x for name, x in given.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    if not output.requires_grad:
        return {}
    found = torch.autograd.grad((k * output).sum(), list(leaves.values()), allow_unused=True)
    return {name: grad for name, grad in zip(leaves, found, strict=True) if grad is not None and grad.any()}


def expected_gradients(golden, state):
    wanted = golden.stopped if state else golden.grads
    if golden.name == "quantile_regression_loss" and state:
        # RLax 0.1.9 stops only the indicator 1[δ < 0], which has no gradient anyway. Ours does what the flag says.
        assert wanted == golden.grads
        wanted = {name: grad for name, grad in wanted.items() if name != "dist_target"}
    return {name: torch.tensor(grad, dtype=F64) for name, grad in wanted.items()}


@pytest.mark.parametrize(("golden", "state"), STATES, ids=IDS)
def test_value(golden, state):
    actual = call(golden, state, arguments(golden))
    torch.testing.assert_close(actual, torch.tensor(golden.value, dtype=F64), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("golden", "state"), STATES, ids=IDS)
def test_dtype(golden, state, dtype):
    assert call(golden, state, arguments(golden, dtype)).dtype == dtype


@pytest.mark.parametrize(("golden", "state"), STATES, ids=IDS)
def test_gradients_reach_the_arguments_they_should_and_no_other(golden, state):
    actual, expected = gradients(golden, state, arguments(golden)), expected_gradients(golden, state)
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("golden", [golden for golden in GOLDEN if golden.flag], ids=lambda golden: golden.name)
def test_the_default_of_the_flag_is_rlaxs(golden):
    """Losses stop their targets by default, returns do not."""
    returns = golden.name.endswith(("returns", "estimation"))
    parameter = inspect.signature(getattr(losses, golden.name)).parameters[golden.flag]
    assert parameter.default is not returns
    assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_in_the_order_of_rlax(name):
    """Our own options (mask_t, reduction) are keyword-only."""
    parameters = inspect.signature(getattr(losses, name)).parameters.values()
    positional = [x.name for x in parameters if x.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional == [known for known in SIGNATURES[name].split() if known != "sample_mask"]


@pytest.mark.parametrize(("golden", "state"), STATES, ids=IDS)
def test_under_vmap_and_grad_in_float32(golden, state):
    """Three copies of the sample, the second one moved: each row is the loss of its own sample."""
    given = arguments(golden, torch.float32)
    tensors = {name: x.detach() for name, x in given.items() if isinstance(x, torch.Tensor)}
    options = {name: x for name, x in given.items() if name not in tensors}
    rows = {name: torch.stack([x, x * 1.25 if x.is_floating_point() else x, x]) for name, x in tensors.items()}

    def total(sample):
        return call(golden, state, {**sample, **options}).sum()

    batched = torch.vmap(lambda sample: call(golden, state, {**sample, **options}))(rows)
    floats = {name: x for name, x in rows.items() if x.is_floating_point()}
    rest = {name: x for name, x in rows.items() if name not in floats}
    by_rows = torch.vmap(torch.func.grad(lambda floats, rest: total({**floats, **rest})))(floats, rest)
    for i in range(3):
        row = {name: x[i] for name, x in rows.items()}
        torch.testing.assert_close(batched[i], call(golden, state, {**row, **options}), rtol=1e-5, atol=1e-6)
        leaves = {name: row[name].clone().requires_grad_() for name in floats}
        loss = total({**row, **leaves}) + 0 * sum(leaf.sum() for leaf in leaves.values())
        expected = torch.autograd.grad(loss, list(leaves.values()))
        for name, grad in zip(leaves, expected, strict=True):
            torch.testing.assert_close(by_rows[name][i], grad, rtol=1e-4, atol=1e-5)


def test_every_loss_has_a_golden_value():
    known = {golden.name for golden in GOLDEN}
    functions = {name for name in losses.__all__ if inspect.isfunction(getattr(losses, name))}
    # The ratios are made of categorical_log_prob; RLax has no loss like sampled_nll.
    assert functions - known == {"stop_gradient", "categorical_log_prob", "sampled_nll"}
