"""The posteriors of docs/laplace.md equal those with dense Hessians of torch.func, in float64."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call, hessian, jacrev
from torch.nn import functional as F

from persample import Curvature, KroneckerFactors, per_sample_grads

TAU = 0.3


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(), torch.randn(6, 3).double()


def outputs(model, x):
    return model(x)


def root(model, x):
    f = model(x)
    p = f.softmax(-1).detach()
    return p.sqrt() * (f - (p * f).sum())


def flat(rows):
    return torch.cat([g.flatten(2) for g in rows.values()], 2)


def params_of(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def test_the_last_layer_has_the_posterior_of_the_dense_hessian():
    model, x = make()
    last, features, y = model[-1], model[:-1](x).detach(), torch.tensor([0, 1, 2, 0, 1, 2])

    def total(p):  # of a linear layer, the Hessian is the Gauss-Newton matrix, whatever the labels
        return F.cross_entropy(functional_call(last, p, (features,)), y, reduction="sum")

    blocks = hessian(total)(params := params_of(last))
    dense = torch.cat([torch.cat([blocks[a][b].reshape(params[a].numel(), -1) for b in params], 1) for a in params])
    rows = flat(per_sample_grads(root, last, features, outputs="rows")).flatten(0, 1)
    torch.testing.assert_close(rows.T @ rows, dense, rtol=1e-9, atol=1e-12)

    values, vectors = torch.linalg.eigh(rows.T @ rows)
    jacobian = flat(per_sample_grads(outputs, last, features, outputs="rows"))
    found = ((jacobian @ vectors).square() / (values + TAU)).sum(-1)
    covariance = jacobian @ torch.linalg.inv(dense + TAU * torch.eye(len(dense)).double()) @ jacobian.mT
    torch.testing.assert_close(found, covariance.diagonal(dim1=1, dim2=2), rtol=1e-9, atol=1e-12)


def test_kronecker_factors_have_the_dense_posterior_of_each_parameter():
    """Of copies of one sample, for which S ⊗ A is the Gauss-Newton matrix."""
    model, x = make()
    copies, n = x[:1].expand(5, -1), 5
    curvature = Curvature(per_sample_grads(root, model, copies, KroneckerFactors(), outputs="rows"))
    jacobian = per_sample_grads(outputs, model, x, outputs="rows")
    solved = torch.vmap(torch.vmap(lambda j: curvature.solve(j, TAU / n)))(jacobian)

    params, p = params_of(model), model(x[0]).detach().softmax(-1)
    of_logits = jacrev(lambda params: functional_call(model, params, (x[0],)))(params)
    for name, g in jacobian.items():
        found = (g * solved[name]).flatten(2).sum(-1) / n
        j = of_logits[name].flatten(1)
        dense = n * j.T @ (p.diag() - torch.outer(p, p)) @ j + TAU * torch.eye(j.shape[1]).double()
        covariance = g.flatten(2) @ torch.linalg.inv(dense) @ g.flatten(2).mT
        torch.testing.assert_close(found, covariance.diagonal(dim1=1, dim2=2), rtol=1e-9, atol=1e-12)
