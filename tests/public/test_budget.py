"""A budget of operations: what reductions of per-sample gradients add to the batch gradient, counted, on any machine.

Counted are the dispatched operations of aten that are no views. Beside what is said per parameter, a call has six.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from counting import functions_entered, operations
from torch import nn
from torch.nn import functional as F

from persample import ClippedMean, Mean, Norm, per_sample_grads

A_CALL = 6


@pytest.fixture(autouse=True)
def _seeded():
    """Norms are computed again where one is out of the range of float32, which depends on the numbers."""
    torch.manual_seed(0)


def counted(call):
    return operations(call).counts


def batch_gradient(loss, net, batch):
    net.zero_grad()
    loss(net, *batch).mean().backward()


def mlp(*sizes):
    layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def td():
    net = mlp(8, 64, 64, 1)

    def loss(net, s, r, s2):
        return ((r + 0.99 * net(s2).squeeze(-1)).detach() - net(s).squeeze(-1)) ** 2

    return loss, net, (torch.randn(256, 8), torch.randn(256), torch.randn(256, 8))


def reinforce():
    def loss(net, s, a, g):
        chosen = torch.log_softmax(net(s), -1).gather(-1, a.unsqueeze(-1)).squeeze(-1)
        return -(chosen * g).sum(-1)

    return loss, mlp(8, 64, 64, 4), (torch.randn(32, 20, 8), torch.randint(4, (32, 20)), torch.randn(32, 20))


def transformer():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return lambda net, x: net(x).square().flatten(-2).sum(-1), layer, (torch.randn(6, 16, 32),)


def images():
    net = nn.Sequential(
        *(nn.Conv2d(4, 16, 4, 2), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()),
        *(nn.Flatten(-3), nn.Linear(16 * 49, 32), nn.ReLU(), nn.Linear(32, 6)),
    )
    return lambda net, x: net(x).square().sum(-1), net, (torch.randn(6, 4, 20, 20),)


def classes():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(-3), nn.Linear(4 * 36, 10))
    batch = torch.randn(8, 1, 8, 8), torch.randint(10, (8,))
    return lambda net, x, y: F.cross_entropy(net(x), y, reduction="mean" if x.ndim == 3 else "none"), net, batch


def q_learning():
    def loss(net, s, a, target):
        q = net(s).gather(-1, a.unsqueeze(-1)).squeeze(-1)
        return F.smooth_l1_loss(q, target, reduction="none")

    return loss, mlp(4, 32, 2), (torch.randn(16, 4), torch.randint(2, (16,)), torch.randn(16))


def running_statistics():
    net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).eval()
    return (
        lambda net, x: net(x.unsqueeze(0) if x.ndim == 1 else x).square().sum(-1).squeeze(-1),
        net,
        (torch.randn(16, 8),),
    )


def tables():
    net = nn.ModuleList([nn.Embedding(50, 8), nn.Embedding(20, 8), nn.Linear(16, 1)])

    def loss(net, one, other):
        return net[2](torch.cat([net[0](one), net[1](other)], -1)).squeeze(-1) ** 2

    return loss, net, (torch.randint(50, (16,)), torch.randint(20, (16,)))


LOSSES = {
    "classes": classes,
    "running_statistics": running_statistics,
    "tables": tables,
    "q_learning": q_learning,
    "td": td,
    "reinforce": reinforce,
    "transformer": transformer,
    "images": images,
}
BUDGET = {"mean": (Mean(), 1), "norm": (Norm(), 4), "clipped": (ClippedMean(1.0), 5)}  # operations per parameter
# A vector of the transformer is added to every step of a sample: the steps are summed first. Matrices with more steps
# than numbers are written out, step by step.
LARGER = {("transformer", "mean"): 2.5, ("reinforce", "norm"): 5}


@pytest.mark.parametrize("reduction", BUDGET)
@pytest.mark.parametrize("name", LOSSES)
def test_operations_beyond_the_batch_gradient(name, reduction):
    loss, net, batch = LOSSES[name]()
    reduce, each = BUDGET[reduction]

    params = len(list(net.parameters()))
    beyond = counted(lambda: per_sample_grads(loss, net, batch, reduce))
    beyond.subtract(counted(lambda: batch_gradient(loss, net, batch)))
    assert beyond.total() <= A_CALL + LARGER.get((name, reduction), each) * params, beyond


@pytest.mark.parametrize("name", LOSSES)
def test_several_reductions_share_what_they_have_in_common(name):
    """The loss is differentiated once and norms are computed once: the mean beside them adds its sums."""
    loss, net, batch = LOSSES[name]()

    def total(*reduces):
        return counted(lambda: per_sample_grads(loss, net, batch, reduces)).total()

    mean, norm, clipped = (reduce for reduce, _ in BUDGET.values())
    sums = len(list(net.parameters())) + A_CALL
    gradient = counted(lambda: batch_gradient(loss, net, batch)).total()
    assert total(mean, norm, clipped) <= max(total(norm), total(clipped)) + total(mean) - gradient + sums


def dictionary():
    """The loss of ``td`` with a dict of parameters and ``F.linear``."""
    _, net, batch = td()
    params = {name: param.detach() for name, param in net.named_parameters()}

    def value(params, x):
        for k in (0, 2, 4):
            x = F.linear(x, params[f"{k}.weight"], params[f"{k}.bias"])
            x = torch.tanh(x) if k < 4 else x.squeeze(-1)
        return x

    return lambda params, s, r, s2: ((r + 0.99 * value(params, s2)).detach() - value(params, s)) ** 2, params, batch


# How often a call enters a Python function of the library.
FUNCTIONS = {
    dictionary: 385,
    td: 385,
    classes: 375,
    images: 515,
    q_learning: 320,
    reinforce: 450,
    running_statistics: 375,
    tables: 335,
    transformer: 870,
}


@pytest.mark.parametrize("workload", FUNCTIONS)
def test_python_functions_of_a_call(workload):
    """The functions of the library that a call enters, and their files, once it is warm."""
    loss, params, batch = workload()
    call = lambda: per_sample_grads(loss, params, batch, ClippedMean(1.0))
    call()
    _, entered = functions_entered(call)
    assert entered.total() <= FUNCTIONS[workload]
    assert len(entered) <= (30 if workload in {td, dictionary} else 36)
