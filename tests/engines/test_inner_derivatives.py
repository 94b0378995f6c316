"""Losses that differentiate by their own inputs, with ``torch.autograd.grad`` as WGAN-GP and PINNs do."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_trees_close, oracle
from torch import nn
from torch.func import functional_call

from persample import Aux, Gram, LossError, Norm, composite_grads, per_sample_grads

F64 = torch.float64
X = torch.randn(6, 5, dtype=F64, generator=torch.Generator().manual_seed(0))


def critic():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def penalty(m, x):
    """Of WGAN-GP, for one sample."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
    return (slope.norm() - 1) ** 2


def penalty_of_a_batch(m, x):
    z = (0.3 * x + 0.7 * x.flip(-1)).requires_grad_(True)
    y = m(z)
    ones = torch.ones_like(y)
    slope = torch.autograd.grad(outputs=y, inputs=z, grad_outputs=ones, create_graph=True, retain_graph=True)[0]
    return ((slope.norm(2, dim=1) - 1) ** 2).mean() + y.mean()


def burgers(m, x):
    """The residual of u_t + u u_x = 0.1 u_xx."""
    s, t = x[..., :1].requires_grad_(), x[..., 1:2].requires_grad_()
    u = m(torch.cat([s, t, x[..., 2:]], -1))
    u_s = torch.autograd.grad(u, s, torch.ones_like(u), create_graph=True)[0]
    u_ss = torch.autograd.grad(u_s, s, torch.ones_like(u_s), create_graph=True)[0]
    u_t = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)[0]
    return (u_t + u * u_s - 0.1 * u_ss).square().mean()


def laplacian(m, x):
    x.requires_grad = True
    slope = torch.autograd.grad(m(x).sum(), x, create_graph=True)[0]
    terms = [torch.autograd.grad(slope[..., i].sum(), x, create_graph=True)[0][..., i] for i in range(5)]
    return torch.stack(terms).sum() ** 2


def products(m, x):
    """Vectors of each sample's own, and one that all share, times the Jacobian."""
    x = x.clone().requires_grad_()
    h = m[:2](x)
    own = torch.autograd.grad(h, x, torch.cat([x, x])[:8].detach(), create_graph=True)[0]
    (shared,) = torch.autograd.grad([h], [x], [torch.arange(8.0, dtype=F64)], create_graph=True)
    return (own * shared).sum() + m(x).sum()


LOSSES = {
    "products with vectors": (products, False),
    "penalty": (penalty, False),
    "penalty of a batch": (penalty_of_a_batch, True),
    "Burgers": (burgers, False),
    "Burgers of a batch": (burgers, True),
    "Laplacian": (laplacian, False),
}


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_the_loop(name, chunk_size):
    loss, keep = LOSSES[name]
    model = critic()
    found = per_sample_grads(loss, model, X, keep_batch_dim=keep, chunk_size=chunk_size)
    expected = oracle(loss, model, (X[:, None] if keep else X,))
    assert_trees_close(found, expected.tree(expected.grads), 1e-9)
    assert not X.requires_grad


def test_parameters_of_a_dict_of_each_sample_and_aux():
    model = critic()
    params = {name: torch.stack([p * (1 + i) for i in range(6)]) for name, p in model.state_dict().items()}

    def loss(params, x):
        value = penalty(lambda z: functional_call(model, params, (z,)), x)
        return value, {"twice": 2 * value}

    wanted = (Norm(), Aux())
    found, expected = (
        per_sample_grads(loss, params, X, wanted, in_dims=(0, 0), engine=engine) for engine in ("eager", "loop")
    )
    assert_trees_close(found, expected, 1e-9)


def residuals(m, x):
    """Several outputs of a sample: the derivatives by its numbers, and one without a parameter."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
    return torch.cat([slope * x, x[:1].detach()])


def test_several_outputs():
    wanted = (None, Norm(), Gram())
    found, expected = (
        per_sample_grads(residuals, critic(), X, wanted, outputs="rows", engine=engine) for engine in ("eager", "loop")
    )
    assert_trees_close(found, expected, 1e-9)


def test_what_is_differentiated_itself_names_torch_func():
    def slopes(m, x):
        return penalty(m, x)[None]

    params = {name: p.detach() for name, p in critic().named_parameters()}
    loss = lambda params, x: penalty(lambda z: functional_call(critic(), params, (z,)), x)
    calls = [
        lambda: per_sample_grads(penalty, critic(), X, differentiable=True),
        lambda: torch.func.grad(lambda params: per_sample_grads(loss, params, X, Norm()).sum())(params),
        lambda: composite_grads(slopes, torch.sum, critic(), X),
    ]
    for call in calls:
        with pytest.raises(
            LossError, match=r"Use torch\.func\.grad.*without differentiable=True, transforms around it and composite"
        ):
            call()
    found, expected = (
        per_sample_grads(penalty, critic(), X, differentiable=engine == "loop", engine=engine)
        for engine in ("loop", "eager")
    )
    assert_trees_close({name: g.detach() for name, g in found.items()}, expected, 1e-9)


@pytest.mark.parametrize("engine", ["traced", "compiled"])
def test_captures_are_refused(engine):
    with pytest.raises(
        LossError, match=r"(requires_grad_\(\)|torch\.autograd\.grad\().*Use torch\.func\.grad, jvp .*engine='eager'"
    ):
        per_sample_grads(penalty, critic(), X, engine=engine)


@pytest.mark.parametrize("engine", ["eager", "traced"])
def test_backward_inside_of_a_loss_is_refused(engine):
    def loss(m, x):
        x = x.clone().requires_grad_()
        m(x).sum().backward(create_graph=True)
        return x.grad.square().sum()

    with pytest.raises(LossError, match=r"calls retain_grad\(\) or backward\(\) itself.*torch\.func\.grad"):
        per_sample_grads(loss, critic(), X, engine=engine)


def test_a_tensor_that_samples_share_is_refused():
    shift = torch.zeros(5, dtype=F64)

    def loss(m, x):
        s = shift.clone().requires_grad_()
        return torch.autograd.grad(m(x + s).sum(), s, create_graph=True)[0].square().sum()

    with pytest.raises(LossError, match=r"pass engine='loop'"):
        per_sample_grads(loss, critic(), X)
    assert per_sample_grads(loss, critic(), X, Norm(), engine="loop").shape == (6,)
