"""TD(λ) with traces and gradient TD, against plain loops, forward views and exact gradients of the objectives."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_trees_close
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from persample import ArgumentError, Mean, per_sample_grads
from persample.losses import lambda_returns, td_loss
from persample.rl import gradient_td_step, td_lambda_step

ENGINES = pytest.mark.parametrize("engine", ["eager", "loop"])
NETWORK = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def value_fn(params, s):
    return functional_call(NETWORK, params, (s,)).squeeze(-1)


def tree(seed=0):
    generator = torch.Generator().manual_seed(seed)
    named = NETWORK.named_parameters()
    return {name: torch.randn(p.shape, generator=generator, dtype=torch.float64) for name, p in named}


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient(params, s):
    """∇v(s) of one state, by autograd."""
    leaves, spec = pytree.tree_flatten(params)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    value = value_fn(pytree.tree_unflatten(leaves, spec), s)
    return pytree.tree_unflatten(torch.autograd.grad(value, leaves), spec)


def scaled_sum(pairs):
    """Σ scale · tree."""
    total = None
    for scale, summand in pairs:
        scaled = pytree.tree_map(lambda x, scale=scale: scale * x, summand)
        total = scaled if total is None else pytree.tree_map(torch.add, total, scaled)
    return total


@ENGINES
def test_online_td_lambda_is_the_loop_over_streams(engine):
    """12 steps of 3 streams that end at different times, with updates between the steps."""
    params = plain = tree()
    states, r, lambda_, alpha = draw(13, 3, 3), draw(12, 3, seed=2), 0.8, 0.1
    discount = torch.full((12, 3), 0.9, dtype=torch.float64)
    discount[4, 0] = discount[7, 2] = 0  # terminated
    done = discount == 0
    done[5, 1] = True  # cut short: the discount stays
    traces, plain_traces = None, [None] * 3
    for t in range(12):
        transition = (states[t], r[t], discount[t], states[t + 1])
        step = td_lambda_step(value_fn, params, traces, transition, lambda_, done_t=done[t], engine=engine)
        params = scaled_sum([(1.0, params), (-alpha, step.update)])
        traces = step.traces
        updates = []
        for i in range(3):
            delta = r[t, i] + discount[t, i] * value_fn(plain, states[t + 1, i]) - value_fn(plain, states[t, i])
            g = gradient(plain, states[t, i])
            e = (
                g
                if plain_traces[i] is None
                else scaled_sum([(discount[t - 1, i] * lambda_, plain_traces[i]), (1.0, g)])
            )
            plain_traces[i] = None if done[t, i] else e
            updates.append((alpha * delta / 3, e))
            torch.testing.assert_close(step.td_errors[i], delta)
        plain = scaled_sum([(1.0, plain), *updates])
        assert_trees_close(params, plain, 1e-12)


def test_without_updates_the_backward_view_is_the_forward_view():
    """Σₜ δₜ eₜ = Σₜ (Gₜ^λ − v(sₜ)) ∇v(sₜ), Sutton and Barto (2018), section 12.1 and exercise 12.3."""
    params, states, r = tree(), draw(11, 3), draw(10, seed=2)
    discount = torch.full((10,), 0.9, dtype=torch.float64)
    discount[-1] = 0
    traces, updates = None, []
    for t in range(10):
        step = td_lambda_step(
            value_fn, params, traces, (states[t : t + 1], r[t : t + 1], discount[t : t + 1], states[t + 1 : t + 2]), 0.7
        )
        traces = step.traces
        updates.append((-1.0, step.update))
    v = torch.stack([value_fn(params, s) for s in states])
    returns = lambda_returns(r, discount, v[1:], 0.7)
    forward = scaled_sum([(returns[t] - v[t], gradient(params, states[t])) for t in range(10)])
    assert_trees_close(scaled_sum(updates), forward, 1e-10)


def test_lambda_0_is_td_0():
    params, transition = tree(), (draw(4, 3), draw(4), torch.full((4,), 0.9, dtype=torch.float64), draw(4, 3, seed=3))
    first = td_lambda_step(value_fn, params, None, transition, 0.0)
    second = td_lambda_step(value_fn, params, first.traces, transition, 0.0)

    def loss(params, s_tm1, r_t, discount_t, s_t):
        return td_loss(value_fn(params, s_tm1), r_t, discount_t, value_fn(params, s_t)) / 2

    expected = per_sample_grads(loss, params, transition, Mean())
    for step in (first, second):
        assert_trees_close(step.update, expected, 1e-12)


def test_modules_work_as_parameters():
    transition = (draw(4, 3).float(), torch.ones(4), torch.ones(4), draw(4, 3, seed=3).float())
    step = td_lambda_step(lambda model, s: model(s).squeeze(-1), NETWORK, None, transition, 0.5)
    assert {name: update.shape for name, update in step.update.items()} == {
        name: param.shape for name, param in NETWORK.named_parameters()
    }
    assert all(trace.shape[0] == 4 for trace in step.traces.values())


def off_policy(batch=9):
    discount = torch.full((batch,), 0.9, dtype=torch.float64)
    discount[2] = 0
    transitions = (draw(batch, 3), draw(batch, seed=4), discount, draw(batch, 3, seed=3))
    return transitions, draw(batch, seed=5).exp()


@ENGINES
@pytest.mark.parametrize("method", ["tdc", "gtd2"])
def test_gradient_td_is_the_loop_over_samples(method, engine):
    """Maei et al. (2009), with ∇²v w from a second derivative of each sample's value."""
    params, w, (transitions, ratio) = tree(), tree(7), off_policy()
    step = gradient_td_step(value_fn, params, w, transitions, ratio, method=method, engine=engine)
    updates, auxiliary = [], []
    for s, r, discount, following, rho in zip(*transitions, ratio, strict=True):
        phi, phi_t = gradient(params, s), gradient(params, following)
        delta = r + discount * value_fn(params, following) - value_fn(params, s)
        dot = sum((a * b).sum() for a, b in zip(phi.values(), w.values(), strict=True))
        updates.append((rho * (dot if method == "gtd2" else delta), phi))
        updates.append((-rho * discount * dot, phi_t))
        leaves = {name: param.requires_grad_() for name, param in tree().items()}
        first = torch.autograd.grad(value_fn(leaves, s), list(leaves.values()), create_graph=True)
        product = sum((a * b).sum() for a, b in zip(first, w.values(), strict=True))
        curvature = torch.autograd.grad(product, list(leaves.values()), allow_unused=True, materialize_grads=True)
        updates.append((-(rho * delta - dot), dict(zip(leaves, curvature, strict=True))))
        auxiliary.append((rho * delta - dot, phi))
    assert_trees_close(step.params, scaled_sum([(-scale / 9, x) for scale, x in updates]), 1e-10)
    assert_trees_close(step.weights, scaled_sum([(-scale / 9, x) for scale, x in auxiliary]), 1e-10)


@pytest.mark.parametrize("method", ["tdc", "gtd2"])
def test_at_the_best_weights_both_descend_the_projected_bellman_error(method):
    """With w = E[φφᵀ]⁻¹ E[ρδφ] the update is ½∇ of E[ρδφ]ᵀ E[φφᵀ]⁻¹ E[ρδφ], curvature included."""
    transitions, ratio = off_policy(60)
    if method == "tdc":  # which takes E[ρ|s] = 1 for granted
        ratio = torch.ones_like(ratio)

    def curved(theta, s):  # three parameters, so that E[φφᵀ] has full rank
        return torch.tanh(s @ theta) + (s @ theta) ** 2 / 4

    def moments(theta):
        s_tm1, r_t, discount_t, s_t = transitions
        v = torch.stack([curved(theta, s) for s in s_tm1])
        delta = r_t + discount_t * torch.stack([curved(theta, s) for s in s_t]) - v
        rows = [torch.autograd.grad(value, theta, create_graph=True)[0] for value in v]
        phi = torch.stack(rows)
        return phi.T @ phi / 60, phi.T @ (ratio * delta) / 60

    theta = draw(3, seed=8).requires_grad_()
    covariance, correlation = moments(theta)
    objective = correlation @ torch.linalg.solve(covariance, correlation)
    expected = torch.autograd.grad(objective, theta)[0] / 2
    w = torch.linalg.solve(covariance, correlation).detach()
    step = gradient_td_step(curved, theta.detach(), w, transitions, ratio, method=method)
    torch.testing.assert_close(step.params, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(step.weights, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)


def test_unknown_methods_are_refused():
    with pytest.raises(ArgumentError, match="method: expected 'tdc' or 'gtd2', received 'td'"):
        gradient_td_step(value_fn, tree(), tree(), *off_policy(), method="td")
