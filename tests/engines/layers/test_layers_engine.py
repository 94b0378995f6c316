"""Losses made of layers take one vmap and plain autograd; all other losses, and all mistakes, are right as well."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools

import numpy as np
import pytest
import torch
from counting import Operations, operations
from oracle import assert_trees_close, oracle, reals
from seams import answers_of_layers, without_copies
from torch import nn
from torch.func import functional_call, jvp, vmap
from torch.func import grad as func_grad
from torch.nn import functional as F

from persample import (
    Aux,
    ClippedMean,
    Factored,
    Gram,
    LossError,
    Mean,
    NaturalGradient,
    Norm,
    Stack,
    Variance,
    explain,
    per_sample_grads,
    stop_gradient,
)
from persample.losses import reinforce_loss, td_loss

F64 = torch.float64
C = torch.ones(3, dtype=F64)


@pytest.fixture
def found(monkeypatch):
    """What the layers engine returned, call by call: None where it refused the loss."""
    return answers_of_layers(monkeypatch)


@pytest.fixture(params=[True, False], ids=["small", "large"])
def are_small(request, monkeypatch):
    """Whether matrices are so small that functions, which are no layers, are given one copy per sample."""
    if not request.param:
        without_copies(monkeypatch)
    return request.param


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def mlp(*sizes, between=nn.Tanh):
    torch.manual_seed(0)
    layers = [layer for i, o in itertools.pairwise(sizes) for layer in (nn.Linear(i, o), between())]
    return nn.Sequential(*layers[:-1]).double()


class Gaussian(nn.Module):
    """A policy with a layer norm, a scale of its own and a vector that nothing uses."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.ReLU(inplace=True), nn.Linear(5, 2))
        self.log_sigma, self.unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(4))
        self.scalar, self.ignored = nn.Parameter(torch.tensor(0.3)), nn.Linear(2, 3)

    def forward(self, obs):
        self.ignored(obs[:2])
        return self.trunk(obs) * self.scalar, self.log_sigma.exp()


class Tied(nn.Module):
    """One weight in two layers, one of them with a bias that is used as a vector, too."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) * self.first.bias


def gaussian_loss(model, obs, a):
    mu, sigma = model(obs)
    return (((a - mu) / sigma) ** 2).sum() + sigma.log().sum()


def square(model, x):
    return model(x).square().sum()


def td(model, s_tm1, r_t, s_t):
    return td_loss(model(s_tm1).squeeze(-1), r_t, 0.9, model(s_t).squeeze(-1))


def residual(model, s_tm1, r_t, s_t):
    return td_loss(model(s_tm1).squeeze(-1), r_t, 0.9, model(s_t).squeeze(-1), stop_target_gradients=False)


def reinforce(model, obs_t, a_t, return_t, mask_t):
    return reinforce_loss(model(obs_t), a_t, return_t, mask_t)


def functional(p, x):
    return F.linear(torch.relu(F.linear(input=x, weight=p["a"]["w"], bias=p["a"]["b"])), p["w"]).exp().sum()


def frozen(model, x):
    return model[2](torch.tanh(model[0](x))).square().sum()


def with_frozen():
    model = mlp(3, 4, 2)
    model[0].requires_grad_(requires_grad=False)
    return model


def with_frozen_weights():
    model = mlp(3, 4, 4, 2)
    model[0].weight.requires_grad_(requires_grad=False)
    model[2].weight.requires_grad_(requires_grad=False)
    return model


def convolutions():
    images = [nn.Conv2d(2, 4, 3, padding="same", groups=2), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    images += [nn.Conv2d(4, 3, 2, bias=False), nn.ConvTranspose2d(3, 2, 3, stride=2, output_padding=1), nn.Tanh()]
    return nn.Sequential(*images, nn.Flatten(0), nn.Linear(2 * 6 * 6, 2))


def frozen_convolutions():
    model = convolutions()
    model[0].weight.requires_grad_(requires_grad=False)
    model[4].bias.requires_grad_(requires_grad=False)
    return model.double()


def used_twice(params, x):
    kernel, bias = params
    return F.conv1d(F.conv1d(x, kernel, bias, 2).tanh(), kernel, padding=1).square().sum()


def recurrences():
    options = {"num_layers": 2, "bidirectional": True}
    layers = nn.GRU(3, 4, **options), nn.LSTM(8, 2, **options), nn.RNN(4, 3, bias=False), nn.Linear(3, 2)
    return nn.ModuleList(layers).double()


def recurrent(model, x):
    gru, lstm, rnn, linear = model
    of_gru, last = gru(x)
    of_lstm, (_, c) = lstm(of_gru, (last[..., :2], 0.1 * last[..., 2:]))
    return linear(rnn(of_lstm)[0]).square().sum() + c.sin().sum()


def cells(model, x):
    cell, linear = model
    state = None
    for x_t in x:
        state = cell(x_t, state)
    return linear(state[0]).square().sum()


class Scaled(nn.Linear):
    """A layer with a scale of its own."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.linspace(1, 2, sizes[1]))

    def forward(self, x):
        return super().forward(x) * self.scale


TREE = {"a": {"w": draw(4, 3), "b": draw(4, seed=1)}, "w": draw(2, 4, seed=2)}
TRANSITIONS = (draw(5, 3), draw(5, seed=1), draw(5, 3, seed=2))
EPISODES = (
    draw(4, 6, 3),
    torch.randint(2, (4, 6), generator=torch.Generator().manual_seed(0)),
    draw(4, 6, seed=1),
    torch.arange(6) < torch.tensor([6, 1, 3, 5])[:, None],
)
LAYERS = {
    "td": (td, mlp(3, 4, 1), TRANSITIONS),
    "residual": (residual, mlp(3, 4, 1), TRANSITIONS),
    "episodes": (reinforce, mlp(3, 12, 2), EPISODES),
    "inplace-relu": (square, mlp(3, 4, 2, between=lambda: nn.ReLU(inplace=True)), (draw(5, 3),)),
    "gaussian": (gaussian_loss, Gaussian().double(), (draw(5, 3), draw(5, 2, seed=1))),
    "tied": (square, Tied().double(), (draw(5, 3),)),
    "frozen-weights": (square, with_frozen_weights(), (draw(5, 3),)),
    "frozen-weights-axes": (square, with_frozen_weights(), (draw(5, 4, 3),)),
    "scaled": (square, nn.Sequential(Scaled(3, 4), nn.Tanh(), Scaled(4, 2)).double(), (draw(5, 3),)),
    "axes": (square, mlp(3, 4, 2), (draw(5, 2, 3, 3),)),
    "functional": (functional, TREE, (draw(5, 3),)),
    "frozen": (frozen, with_frozen(), (draw(5, 3),)),
    "one": (td, mlp(3, 4, 1), tuple(x[:1] for x in TRANSITIONS)),
    "strided": (square, mlp(3, 4, 2), (draw(5, 3, 4).mT[:, ::2],)),
    "no-bias": (square, nn.Linear(3, 2, bias=False).double(), (draw(5, 3),)),
    "convolutions": (square, convolutions().double(), (draw(3, 2, 6, 6),)),
    "convolutions-axes": (lambda model, x: square(model[:6], x), convolutions().double(), (draw(3, 2, 2, 6, 6),)),
    "frozen-convolutions": (square, frozen_convolutions(), (draw(3, 2, 6, 6),)),
    "recurrent": (recurrent, recurrences(), (draw(4, 5, 3),)),
    "recurrent-axes": (recurrent, recurrences(), (draw(4, 5, 2, 3),)),
    "recurrent-cells": (cells, nn.ModuleList([nn.LSTMCell(3, 4), nn.Linear(4, 2)]).double(), (draw(4, 5, 3),)),
    "constant-sequence": (
        lambda model, x: (model(torch.ones(5, 3, dtype=F64))[0] * x[:, :1]).sum(),
        nn.RNN(3, 4).double(),
        (draw(4, 5, 3),),
    ),
    "kernel-used-twice": (used_twice, [draw(4, 4, 3), draw(4)], (draw(5, 4, 7),)),
}
REDUCTIONS = {"stack": Stack(), "mean": Mean(), "clipped": ClippedMean(0.5), "norm": Norm(), "gram": Gram()}


def expected(loss, params, batch):
    rows = oracle(loss, params, batch)
    flat = reals(rows)
    norms = flat.norm(dim=1)
    scales = (0.5 / norms).clamp(max=1)
    return {
        "stack": rows.tree(rows.grads),
        "mean": rows.tree([grad.mean(0) for grad in rows.grads]),
        "clipped": rows.tree([torch.einsum("b,b...->...", scales, grad) / len(grad) for grad in rows.grads]),
        "norm": norms,
        "gram": flat @ flat.T,
    }


@pytest.mark.parametrize("chunk_size", [None, 2], ids=["whole", "chunks"])
@pytest.mark.parametrize("case", LAYERS)
def test_losses_of_linear_layers(found, case, chunk_size):
    loss, params, batch = LAYERS[case]
    truth = expected(loss, params, batch)
    for name, reduction in REDUCTIONS.items():
        found.clear()
        result = per_sample_grads(loss, params, batch, reduction, chunk_size=chunk_size)
        assert found
        assert None not in found
        assert_trees_close(result, truth[name], rtol=1e-9)
    together = per_sample_grads(loss, params, batch, REDUCTIONS, chunk_size=chunk_size)
    assert_trees_close(together, truth, rtol=1e-9)


def test_biases_of_layers_may_be_large(found):
    model, x = mlp(3, 5000), draw(2, 3)
    assert_trees_close(per_sample_grads(square, model, x, REDUCTIONS), expected(square, model, (x,)), rtol=1e-9)
    assert None not in found


def decayed_bias(model, x):
    return model(x).square().sum() + model[0].bias.square().sum()


def bias_of_another(model, x):
    return F.linear(torch.tanh(model[0](x)), model[2].weight, 2 * model[0].bias[:2]).square().sum()


def detached_bias(model, x):
    return (model(x) + model[2].bias.detach()).square().sum()


@pytest.mark.parametrize("loss", [decayed_bias, bias_of_another, detached_bias], ids=lambda f: f.__name__)
def test_biases_of_layers_with_another_use(found, loss):
    model, x = mlp(3, 4, 2), draw(5, 3)
    truth = expected(loss, model, (x,))
    assert_trees_close(per_sample_grads(loss, model, x, REDUCTIONS), truth, rtol=1e-9)
    assert None not in found


def test_weights_and_out(found):
    loss, model, batch = LAYERS["td"]
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0])
    batch = (batch[0].clone(), *batch[1:])
    batch[0][1] = torch.nan
    rows = oracle(loss, model, tuple(x[weights > 0] for x in batch))
    kept = weights[weights > 0].double()
    truth = rows.tree([torch.einsum("b,b...->...", kept, grad) / kept.sum() for grad in rows.grads])
    assert_trees_close(per_sample_grads(loss, model, batch, Mean(), weights=weights), truth, rtol=1e-9)
    out = per_sample_grads(loss, model, LAYERS["td"][2])
    before = {name: x.clone() for name, x in out.items()}
    [x.zero_() for x in out.values()]
    assert per_sample_grads(loss, model, LAYERS["td"][2], out=out) is out
    assert_trees_close(out, before, rtol=1e-12)
    assert None not in found


def test_aux_and_one_row_for_all(found):
    def loss(model, x, shared):
        y = model(x) * shared
        return y.sum(), {"y": y, "shared": shared, "count": torch.tensor(3)}

    model, x, shared = mlp(3, 2), draw(4, 3), draw(2, seed=1)
    grads, aux = per_sample_grads(loss, model, (x, shared), (Stack(), Aux()), in_dims=(None, (0, None)))
    assert_trees_close(aux["y"], model(x).detach() * shared, rtol=1e-12)
    assert aux["shared"].shape == (4, 2)
    assert aux["count"].tolist() == [3] * 4
    assert not aux["y"].requires_grad
    assert grads["0.weight"].shape == (4, 2, 3)
    assert None not in found


def test_factors_are_signals_and_inputs(found):
    loss, model, batch = LAYERS["episodes"]
    factors = per_sample_grads(loss, model, batch, Factored())
    assert {type(factor).__name__ for factor in factors.values()} <= {"Outer", "Dense"}
    rows = oracle(loss, model, batch)
    assert_trees_close({k: f.materialize() for k, f in factors.items()}, rows.tree(rows.grads), rtol=1e-9)
    assert None not in found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(found, dtype):
    model, x = mlp(3, 4, 2).to(dtype), draw(5, 3).to(dtype)
    rows = oracle(square, model, (x,))
    result = per_sample_grads(square, model, x, Mean())
    assert {grad.dtype for grad in result.values()} == {dtype}
    truth = rows.tree([grad.mean(0) for grad in rows.grads])
    assert_trees_close(result, truth, rtol=1e-4 if dtype == torch.float32 else 0.05)
    assert None not in found


# Products with matrices, however they are spelled

MATRICES = {"w": draw(4, 3), "v": draw(2, 4, seed=1), "b": draw(4, seed=2)}
VECTOR, STEPS, STACKED = (draw(5, 3),), (draw(5, 6, 3),), (draw(5, 2, 6, 3),)


def spelled(first, second):
    return lambda p, x: second(torch.tanh(first(p["w"], x) + p["b"]), p["v"]).square().sum()


PRODUCTS = {
    "w @ x": (spelled(lambda w, x: w @ x, lambda x, v: v @ x), VECTOR),
    "x @ w.T": (spelled(lambda w, x: x @ w.T, lambda x, v: x @ v.mT), VECTOR),
    "x @ w.t()": (spelled(lambda w, x: torch.matmul(x, w.t()), lambda x, v: x.matmul(torch.t(v))), STEPS),
    "x.T @ w.T": (spelled(lambda w, x: x.mT @ w.T, lambda x, v: x @ v.T), (draw(5, 3, 6),)),
    "w @ matrix": (spelled(lambda w, x: (w @ x.mT).mT, lambda x, v: v @ x.mT), STEPS),
    "w @ matrices": (spelled(lambda w, x: (w @ x.mT).mT, lambda x, v: torch.matmul(v, x.mT)), STACKED),
    "linear of a transpose": (lambda p, x: F.linear(F.linear(x, p["w"], p["b"]), p["w"].T).exp().sum(), STEPS),
    "autoencoder": (lambda p, x: (torch.tanh(x @ p["w"].T) @ p["w"]).square().sum(), VECTOR),
    "a layer and a product": (lambda p, x: (F.linear(x, p["w"]) @ p["w"]).exp().sum() + (p["w"] @ x).sum(), VECTOR),
    "transposed twice": (lambda p, x: (x @ p["w"].T.T.T).square().sum(), VECTOR),
    "of a constant": (lambda p, x: (x @ p["w"].detach().T @ p["w"]).square().sum(), VECTOR),
    "without a gradient": (lambda p, x: (x @ p["w"].T).square().sum() * (x @ p["w"].T).detach().sum(), VECTOR),
}


def constant(function):
    """Call a function without grad mode: its results are constants, whatever parameters it uses."""
    with torch.no_grad():
        return function()


CONSTANTS = {
    "transpose": lambda p, x: ((x @ p["w"].T) @ constant(lambda: p["v"].T)).square().sum(),
    "transposed back": lambda p, x: (x @ p["w"].T @ constant(lambda: p["w"].T).T.mT.T).square().sum(),
    "transposed back within": lambda p, x: ((t := p["w"].T) is not None) * (x @ constant(lambda: t.T).T @ p["w"]).sum(),
    "layer": lambda p, x: (F.linear(x, p["w"]) - constant(lambda: F.linear(2 * x, p["w"], p["b"]))).square().sum(),
    "product": lambda p, x: (x @ p["w"].T).square().sum() * constant(lambda: (p["v"] @ (p["w"] @ x.mT)).exp().sum()),
    "regularizer": lambda p, x: (x @ p["w"].T).square().sum() * constant(lambda: p["w"].square().sum()),
    "einsum": lambda p, x: (
        (x @ p["w"].T).exp().sum() * (x @ constant(lambda: torch.einsum("vi,io->ov", p["v"], p["w"]))).sum()
    ),
    "part": lambda p, x: (x @ p["w"].T).square().sum() * constant(lambda: p["w"][0].sum() + 1),
}


@pytest.mark.parametrize("case", CONSTANTS)
def test_uses_without_grad_mode_are_constants(found, case):
    loss = CONSTANTS[case]
    assert_trees_close(per_sample_grads(loss, MATRICES, STEPS, REDUCTIONS), expected(loss, MATRICES, STEPS), rtol=1e-9)
    assert found
    assert None not in found


def test_a_table_used_as_a_constant(found):
    def loss(table, index):
        return (F.embedding(index, table) @ constant(table.t)).square().sum()

    table, index = draw(6, 4), torch.tensor([[0, 3], [5, 5], [2, 0]])
    assert_trees_close(per_sample_grads(loss, table, index, REDUCTIONS), expected(loss, table, (index,)), rtol=1e-9)


@pytest.mark.parametrize("case", PRODUCTS)
def test_products_with_matrices_are_layers(found, case):
    loss, batch = PRODUCTS[case]
    assert_trees_close(per_sample_grads(loss, MATRICES, batch, REDUCTIONS), expected(loss, MATRICES, batch), rtol=1e-9)
    assert None not in found
    assert found
    factors = per_sample_grads(loss, MATRICES, batch, Factored())
    assert type(factors["w"]).__name__ in {"Outer", "Dense"}


def test_products_of_narrow_matrices(found):
    params = {"w": draw(4, 1), "v": draw(1, 4, seed=1)}

    def loss(p, x):
        return ((p["v"] @ torch.tanh(p["w"] @ x)) * (x @ p["v"])).square().sum()

    assert_trees_close(
        per_sample_grads(loss, params, draw(5, 1), REDUCTIONS), expected(loss, params, (draw(5, 1),)), rtol=1e-9
    )
    assert None not in found


@pytest.mark.parametrize("stride", [np.int64(2), torch.tensor(2), [np.int64(2)], torch.Size([2])], ids=repr)
def test_numbers_of_any_kind_as_settings_of_a_convolution(found, stride):
    def loss(kernel, x, stride):
        return F.conv1d(x, kernel, stride=stride).square().sum()

    kernel, x = draw(2, 3, 3), draw(4, 3, 7)
    rows = per_sample_grads(lambda p, x: loss(p, x, stride), kernel, x)
    assert_trees_close(rows, per_sample_grads(lambda p, x: loss(p, x, 2), kernel, x, engine="loop"), rtol=1e-9)
    assert None not in found


@pytest.mark.parametrize(
    ("convolve", "kernel", "message"),
    [
        (lambda x, k: F.conv1d(x, k, stride=2, padding="same"), (2, 3, 3), "'same' is not supported for strided"),
        (F.conv2d, (2, 3, 3), r"Expected 3D \(unbatched\) or 4D \(batched\) input to conv2d"),
        (F.conv_transpose2d, (3, 2, 3), r"Expected 3D \(unbatched\) or 4D \(batched\) input to conv_transpose2d"),
    ],
    ids=["strided and same", "another dimension", "transposed"],
)
def test_convolutions_that_torch_refuses(convolve, kernel, message):
    def loss(kernel, x):
        return convolve(x, kernel).square().sum()

    with pytest.raises(RuntimeError, match=message):
        per_sample_grads(loss, draw(*kernel), draw(4, 3, 7))


# What is no loss of linear layers alone

W = {"w": draw(4, 3), "v": draw(2, 4, seed=1)}


def decayed(p, x):
    return F.linear(torch.tanh(F.linear(x, p["w"])), p["v"]).sum() + p["w"].square().sum()


def masked(p, x):
    return F.linear(torch.tanh(F.linear(x, p["w"] * (p["w"] > 0))), p["v"]).sum()


def transposed(p, x):
    return F.linear(torch.tanh(F.linear(x, p["w"])), p["v"].T.contiguous().T).sum()


def multiplied(p, x):
    return (p["v"] @ torch.tanh(p["w"] @ x)).sum()


def bias_of_a_matrix(p, x):
    return F.linear(torch.tanh(F.linear(x, p["w"], p["w"].sum(1))), p["v"]).sum()


def inner_gradient(p, x):
    slope = func_grad(lambda x: F.linear(torch.tanh(F.linear(x, p["w"])), p["v"]).sum())(x)
    return slope.square().sum()


def inner_weight_gradient(p, x):
    slope = func_grad(lambda w: F.linear(torch.tanh(F.linear(x, w)), p["v"]).sum())(p["w"])
    return slope.square().sum()


def inner_vmap(p, x):
    return vmap(lambda row: F.linear(torch.tanh(F.linear(row, p["w"])), p["v"]).sum())(torch.stack([x, 2 * x])).sum()


def shared_input(p, x):
    return F.linear(torch.tanh(F.linear(torch.ones(3, dtype=F64), p["w"])) * x.sum(), p["v"]).sum()


def half_detached(p, x):
    return F.linear(torch.tanh(F.linear(x, stop_gradient(p["w"]))), p["v"]).sum() + p["w"][0, 0] * x[0]


def hidden_use(p, x):
    with torch._C.DisableTorchFunction():  # no mode sees this use
        rest = p["w"].square().sum()
    return F.linear(x, p["w"]).sum() + rest


def written_out(p, x):
    """Write into a tensor of the loss's own, named by a keyword."""
    y = x.clone()
    torch.relu_(input=y)
    return torch.norm(F.linear(y, p["w"]), dim=0, out=None).exp().sum()


def matrices_multiplied(p, x):
    return (p["v"] @ p["w"] @ x).exp().sum()


def by_two_names(p, x):
    return torch.matmul(input=x, other=p["w"].T).exp().sum() + torch.t(input=p["v"]).sum()


def looked_up(p, x):
    return (p["w"][torch.tensor([0, 2])] @ x).exp().sum()


def caught(p, x):
    """Catch a refusal, and go on with another value."""
    scale = 1
    with contextlib.suppress(Exception):
        scale = (p["w"] * 2).sum()
    return F.linear(x, p["w"]).exp().sum() * scale


OTHERS = [
    decayed,
    masked,
    transposed,
    multiplied,
    bias_of_a_matrix,
    inner_gradient,
    inner_weight_gradient,
    inner_vmap,
    shared_input,
    half_detached,
    matrices_multiplied,
    by_two_names,
    looked_up,
    hidden_use,
    written_out,
    caught,
]


@pytest.mark.parametrize("loss", OTHERS, ids=lambda f: f.__name__)
def test_other_losses(loss):
    x = draw(5, 3, seed=3)
    truth = expected(loss, W, (x,))
    assert_trees_close(per_sample_grads(loss, W, (x,), REDUCTIONS), truth, rtol=1e-9)


def with_frozen_weight(module, name):
    getattr(module, name).requires_grad_(requires_grad=False)
    return module.double()


class Started(nn.GRU):
    """A recurrent layer that learns its initial state."""

    def __init__(self):
        super().__init__(3, 4)
        self.start = nn.Parameter(draw(1, 4))

    def forward(self, x):
        return super().forward(x, self.start)


KERNELS, IMAGE, SEQUENCE = {"w": draw(2, 3, 3), "b": draw(2)}, draw(4, 3, 6), draw(4, 5, 3)
NOT_LAYERS = {
    "a projected state": (lambda model, x: model(x)[0].sin().sum(), nn.LSTM(3, 4, proj_size=2).double(), SEQUENCE),
    "a frozen recurrent weight": (
        lambda model, x: model(x)[0].sin().sum(),
        with_frozen_weight(nn.GRU(3, 4), "weight_hh_l0"),
        SEQUENCE,
    ),
    "a learned initial state": (lambda model, x: model(x)[0].sin().sum(), Started().double(), SEQUENCE),
    "a padded output": (square, nn.ConvTranspose1d(3, 2, 3, dilation=3, output_padding=2).double(), IMAGE),
    "unequal padding": (lambda p, x: F.conv1d(x, p["w"][..., 1:], padding="same").sin().sum(), KERNELS, IMAGE),
    "an even kernel": (square, nn.Conv1d(3, 2, 4, padding="same").double(), IMAGE),
    "a constant image": (
        lambda p, x: (F.conv1d(torch.ones(3, 6, dtype=F64), p["w"], p["b"]) * x[:2, :4]).sum(),
        KERNELS,
        IMAGE,
    ),
    "a kernel times an image": (lambda p, x: (p["w"] * F.conv1d(x, p["w"], p["b"])[0, 0]).sum(), KERNELS, IMAGE),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("case", NOT_LAYERS)
def test_convolutions_and_recurrences_that_are_not_layers(are_small, case):
    loss, params, x = NOT_LAYERS[case]
    assert_trees_close(per_sample_grads(loss, params, x, REDUCTIONS), expected(loss, params, (x,)), rtol=1e-9)


WEIGHTS = {
    "a": draw(5, 3),
    "b": draw(2, 5, seed=1),
    "v": draw(5, seed=2),
    "s": draw(5, 1, seed=3),
    "t": draw(1, seed=4)[0],
}


def two_layers(p, x, first, second):
    return F.linear(F.linear(x, first, p["v"]).tanh(), second).square().sum()


# Losses of WEIGHTS and x [3], whose functions of matrices have no other tensors among their arguments.
OF_PARAMS_ALONE = {
    "a scaled layer": lambda p, x: two_layers(p, x, p["a"] / 2, p["b"]),
    "a scaled last layer": lambda p, x: two_layers(p, x, p["a"], p["b"].exp()),
    "a masked layer": lambda p, x: two_layers(p, x, p["a"] * (p["a"] > 0), p["b"]),
    "weight normalization": lambda p, x: two_layers(p, x, p["s"] * p["a"] / p["a"].norm(dim=1, keepdim=True), p["b"]),
    "a spectral norm": lambda p, x: two_layers(p, x, p["a"] / torch.linalg.matrix_norm(p["a"], 2), p["b"]),
    "a softmax": lambda p, x: two_layers(p, x, p["a"].softmax(1), p["b"]),
    "a merged product": lambda p, x: ((p["b"] @ p["a"]) @ x).tanh().sum(),
    "joined weights": lambda p, x: (torch.cat([p["a"], p["b"].T @ p["b"][:, :3]]) @ x).tanh().sum(),
    "another shape": lambda p, x: (p["a"].reshape(3, 5).T @ x).tanh().sum(),
    "parts": lambda p, x: sum((w @ x).tanh().sum() for w in p["a"].split([2, 3])),
    "rows": lambda p, x: sum((w @ x).tanh() for w in p["a"]),
    "a row's scale": lambda p, x: (p["b"] * p["v"] @ (p["a"] @ x)).tanh().sum(),
    "two uses": lambda p, x: ((p["a"] * 2) @ x + p["a"] @ x).tanh().sum(),
    "a transpose": lambda p, x: (x @ (p["a"].T * 2)).tanh().sum(),
    "a kernel": lambda p, x: F.conv1d(x.repeat(1, 2), (p["a"] / 2)[:, None], p["v"]).tanh().sum(),
    "a table": lambda p, x: F.embedding((x > 0).long(), p["a"] * 2).tanh().sum(),
    "a tied table": lambda p, x: (F.embedding((x > 0).long(), p["a"]) @ (p["a"].T / 2)).tanh().sum(),
    "an inverse": lambda p, x: (torch.linalg.inv(p["a"].T @ p["a"] + torch.eye(3, dtype=F64)) @ x).tanh().sum(),
    "a constant input": lambda p, x: (F.linear(torch.ones(2, 3, dtype=F64), p["a"])[0] + p["a"] @ x).tanh().sum(),
    "distances, which vmap differentiates wrongly": lambda p, x: (
        torch.cdist(p["a"], p["a"] * 2 + 1)[:3, :3] @ x
    ).sum(),
    "a product of zeros": lambda p, x: ((p["a"] * (p["a"] > 0)).cumprod(0) @ x).sum(),
    "indices beside values": lambda p, x: (p["a"].max(1).values * (p["a"] @ x)).sum(),
    "a penalty": lambda p, x: two_layers(p, x, p["a"], p["b"]) + 0.1 * sum(w.square().sum() for w in p.values()),
    "a penalty alone": lambda p, _: p["a"].square().sum() + p["t"],
    "a constant": lambda p, x: ((p["a"] * 2).detach() @ x * p["t"]).sum(),
    "a gradient of zero": lambda p, x: (p["a"] * 2).sum() * 0 + (p["b"] @ p["v"]).sum() * x.sum(),
    "a large vector": lambda p, x: (p["a"].repeat(1, 2000)[0] + x.sum()).square().mean(),
}


@pytest.mark.parametrize("chunk_size", [None, 2], ids=["whole", "chunks"])
@pytest.mark.parametrize("case", OF_PARAMS_ALONE)
def test_what_is_computed_of_parameters_alone(found, case, chunk_size):
    loss, x = OF_PARAMS_ALONE[case], draw(5, 3, seed=5)
    truth = expected(loss, WEIGHTS, (x,))
    assert_trees_close(per_sample_grads(loss, WEIGHTS, x, REDUCTIONS, chunk_size=chunk_size), truth, rtol=1e-9)
    assert None not in found


@pytest.mark.parametrize("split", [lambda w: w.split([2, 4]), lambda w: (w[:2], w[2:])], ids=["split", "sliced"])
def test_rows_of_a_matrix_keep_their_factors(found, split):
    def loss(p, x):
        first, second = split(p["w"])
        return F.linear(x, first, p["b"][:2]).tanh().sum() + F.linear(2 * x, second, p["b"][2:]).sin().sum()

    params, x = {"w": draw(6, 3), "b": draw(6)}, draw(5, 3)
    factor = per_sample_grads(loss, params, x, Factored())["w"]
    assert type(factor).__name__ == "Outer"
    assert None not in found
    assert_trees_close(factor.materialize(), expected(loss, params, (x,))["stack"]["w"], rtol=1e-9)


def test_a_computed_kernel_of_two_unlike_convolutions(found):
    """Their gradients are a sum of products of patches."""

    def loss(p, x):
        kernel = p["w"] / 2
        return F.conv1d(x, kernel).sin().sum() + F.conv1d(x, kernel, dilation=2).tanh().sum()

    params, x = {"w": draw(32, 32, 3)}, draw(4, 32, 9)
    assert_trees_close(per_sample_grads(loss, params, x, REDUCTIONS), expected(loss, params, (x,)), rtol=1e-9)
    per_sample_grads(loss, params, x, Norm())
    assert None not in found


def test_random_numbers_beside_parameters_are_refused():
    with pytest.raises(LossError, match="draws random numbers"):
        per_sample_grads(lambda p, x: two_layers(p, x, F.dropout(p["a"]), p["b"]), WEIGHTS, draw(5, 3), Mean())


def test_complex_numbers_computed_of_parameters():
    loss = lambda p, x: (torch.complex(p["a"], p["a"]) @ x.to(torch.complex128)).abs().sum()
    x = draw(5, 3)
    assert_trees_close(per_sample_grads(loss, WEIGHTS, x, REDUCTIONS), expected(loss, WEIGHTS, (x,)), rtol=1e-9)


# Losses of WEIGHTS and x [3] with functions of matrices and of values of the samples that are no layers.
OF_BOTH = {
    "a product of three": lambda p, x: torch.einsum("i,oi,o->o", x, p["a"], p["v"]).tanh().sum(),
    "a product of three of the samples": lambda p, x: torch.einsum("i,oi,o->", x, p["a"], p["a"] @ x),
    "a tensor product": lambda p, x: torch.tensordot(x.tanh(), p["a"], ([0], [1])).tanh().sum(),
    "a bilinear form": lambda p, x: F.bilinear(x, x[:1], p["a"][:, :, None], p["v"]).tanh().sum(),
    "a form of matrices": lambda p, x: F.bilinear(p["a"] @ x, x, torch.stack([p["a"], 2 * p["a"]])).tanh().sum(),
    "distances": lambda p, x: torch.cdist(x[None], p["a"]).sin().sum() + (x * p["t"]).sum(),
    "angles": lambda p, x: F.cosine_similarity((x * p["t"])[None], p["a"]).exp().sum(),
    "a gather": lambda p, x: p["a"][(x > 0).long()].exp().sum() + p["b"].gather(0, (x > 0).long()[None]).sum(),
    "a gather of a large vector": lambda p, x: p["a"].repeat(400, 1).flatten()[(x > 0).long() * 4999].exp().sum(),
    "a solution": lambda p, x: torch.linalg.solve(p["a"].T @ p["a"] + torch.eye(3, dtype=F64), x).tanh().sum(),
    "attention": lambda p, x: F.scaled_dot_product_attention(p["a"], *[torch.outer(p["v"], x)] * 2).exp().sum(),
    "joined rows": lambda p, x: torch.cat([p["a"], x[None]]).softmax(0).square().sum(),
    "parts of rows": lambda p, x: torch.vstack([x * p["t"], p["a"].T[:, :3]]).exp().sum(),
    "a transpose": lambda p, x: torch.tensordot(p["a"].T, p["a"] @ x, ([1], [0])).tanh().sum(),
    "twice the same matrix": lambda p, x: torch.einsum("i,oi,oi->o", x, p["a"], p["a"]).tanh().sum(),
    "no gradients of the samples": lambda p, x: torch.tensordot((x > 0).double(), p["a"], ([0], [1])).tanh().sum(),
    "a constant part": lambda p, x: torch.einsum("i,oi,o->o", x, p["a"], torch.arange(5.0, dtype=F64)).tanh().sum(),
    "a number of a matrix": lambda p, x: two_layers(p, x, p["a"] / (p["a"].norm() + 1e-6), p["b"]),
    "a function of a number": lambda p, x: (p["a"] @ x * p["t"].exp()).tanh().sum() + p["t"].exp() * p["v"].exp().sum(),
    "several of a vector": lambda p, x: (
        sum((y * x[0]).tanh().sum() for y in p["v"].split([2, 3])) * (p["b"] @ p["v"]).sum()
    ),
    "a number alone": lambda p, x: p["t"].exp(),
}
# The same, pointwise.
POINTWISE = {
    "a vector across": lambda p, x: two_layers(p, x, p["a"] * p["v"][:, None], p["b"] * p["t"]),
    "a product": lambda p, x: (p["a"] * x).tanh().sum(),
    "a quotient": lambda p, x: (x / (p["a"].T.T + 9)).tanh().sum(),
    "a difference": lambda p, x: (x - p["a"]).square().sum(),
    "a choice": lambda p, x: torch.where(x > 0, p["a"], x * p["t"]).exp().sum(),
    "a power": lambda p, x: (x.exp() ** p["a"]).sum(),
    "a scaled layer": lambda p, x: (p["a"] * x.sum().tanh() @ x).tanh().sum(),
    "a scaled transpose": lambda p, x: (x @ (p["a"].T * x.sum().tanh())).tanh().sum(),
}


@pytest.mark.parametrize("chunk_size", [None, 2], ids=["whole", "chunks"])
@pytest.mark.parametrize("case", OF_BOTH | POINTWISE)
def test_functions_of_parameters_and_samples(found, are_small, case, chunk_size):
    loss, x = (OF_BOTH | POINTWISE)[case], draw(5, 3, seed=5)
    truth = expected(loss, WEIGHTS, (x,))
    assert_trees_close(per_sample_grads(loss, WEIGHTS, x, REDUCTIONS, chunk_size=chunk_size), truth, rtol=1e-9)
    assert not (are_small and None in found) or "gather" in case


def halved_in_place(p, x):
    y = torch.tensordot(x, p["a"], ([0], [1]))
    y /= 2
    return y.tanh().sum()


def halved_view(p, x):
    y = torch.tensordot(x * p["t"], p["a"], ([0], [1]))
    y[:2] /= 2
    return y.tanh().sum()


def tripled_alias(p, x):
    hidden = x * p["t"]
    same = hidden.type_as(p["a"])
    same.mul_(3)
    return (p["a"] @ hidden).square().sum()


def views_of_values(p, x):
    hidden = p["a"] @ x
    table, same = torch.broadcast_tensors(p["b"], hidden)
    return (table * same).tanh().sum() + hidden.sum()


VIEWS_AND_WRITES = [halved_in_place, halved_view, tripled_alias, views_of_values]


@pytest.mark.parametrize("loss", VIEWS_AND_WRITES, ids=lambda f: f.__name__)
def test_views_of_and_writes_into_results_of_functions_of_matrices(are_small, loss):
    x = draw(5, 3)
    assert_trees_close(per_sample_grads(loss, WEIGHTS, x, REDUCTIONS), expected(loss, WEIGHTS, (x,)), rtol=1e-9)


def zeroed_index(p, x):
    index = x.argsort()
    y = F.embedding(index, p["a"])
    index.zero_()
    return (y * x).sin().sum()


def scaled_solution(p, x):
    triangle = (p["a"][:3] + 9 * torch.eye(3, dtype=F64)).tril()
    y = torch.linalg.solve_triangular(triangle, torch.outer(x, x), upper=False)
    y.mul_(2)
    return y.sin().sum()


def raised_operand(p, x):
    hidden = x * 1
    y = torch.einsum("i,oi,i->", hidden, p["a"], hidden)
    hidden.add_(1)
    return y.sin()


def raised_activation(p, x):
    hidden = (x * p["t"]).exp()
    y = torch.tensordot(hidden, p["a"], ([0], [1]))
    hidden += 1
    return y.tanh().sum() + hidden.sum()


REFUSED_WRITES = [zeroed_index, scaled_solution, raised_operand, raised_activation]


@pytest.mark.parametrize("engine", ["loop", "eager"])
@pytest.mark.parametrize("loss", REFUSED_WRITES, ids=lambda f: f.__name__)
def test_writes_that_autograd_refuses(are_small, loss, engine):
    with pytest.raises((RuntimeError, LossError), match="modified by an inplace operation"):
        per_sample_grads(loss, WEIGHTS, draw(5, 3), Mean(), engine=engine)


def products_as_signals(p, x):
    """Multiply with a vector of the sample what layers return: their output gradients are products."""
    c = torch.tensordot(p["v"] * x.sum(), p["b"], ([0], [1]))
    hidden = F.linear(torch.outer(x, x), p["a"]).T @ torch.outer(x, p["b"] @ p["v"] * c)
    return (hidden @ c).square().sum() + (F.embedding((x > 0).long(), p["b"])[:2].T @ c).exp().sum()


def test_output_gradients_that_are_products(found, are_small):
    x = draw(5, 3, seed=5)
    truth = expected(products_as_signals, WEIGHTS, (x,))
    assert_trees_close(per_sample_grads(products_as_signals, WEIGHTS, x, REDUCTIONS), truth, rtol=1e-9)
    assert not (are_small and None in found)


def written_later(p, x):
    """Write into a view of what was computed of a vector, and into another result, before they meet a matrix."""
    scale, shift = 3 * p["v"], p["v"] + 1
    part, doubled = scale[:2], 2 * scale
    part += 1
    shift.mul_(p["t"])
    return two_layers(p, x, p["a"] * scale[:, None] + shift[:, None], p["b"] * doubled)


def squared_many_times(p, x):
    number = p["t"]
    for _ in range(40):
        number = (number * number).clamp(0.5, 2)
    return two_layers(p, x, p["a"] * number, p["b"])


def joined_numbers(p, x):
    both = torch.stack([p["t"], p["t"].exp()])
    low, high = both.aminmax()
    return two_layers(p, x, p["a"] * both[1] + low, p["b"] / high) + both.detach().sum() * p["t"]


def without_grad_first(p, x):
    scale = p["v"].exp()
    with torch.no_grad():
        F.kl_div(scale, scale, reduction="sum")
    return two_layers(p, x, p["a"] * scale[:, None], p["b"])


def sizes(p, x):
    """Return numbers, and vectors as they are, from functions of vectors."""
    column = p["v"].unsqueeze(1).contiguous()
    return two_layers(p, x, p["a"] * column, p["b"].sum(column.size(1), keepdim=True) * p["v"].contiguous())


ON_RESULTS = [written_later, squared_many_times, joined_numbers, without_grad_first, sizes]


@pytest.mark.parametrize("loss", ON_RESULTS, ids=lambda f: f.__name__)
def test_matrices_computed_with_results_of_small_vectors(found, loss):
    x = draw(5, 3, seed=5)
    assert_trees_close(per_sample_grads(loss, WEIGHTS, x, REDUCTIONS), expected(loss, WEIGHTS, (x,)), rtol=1e-9)
    assert (None in found) == (loss is without_grad_first)  # calls kl_div


# Losses of y = w tanh(a x) [2, 3] and its like, which torch batches within a derivative alone.
WITHIN_A_DERIVATIVE = {
    "kl_div": lambda y, x: F.kl_div(y.log_softmax(-1), x.softmax(-1).expand(2, 3), reduction="batchmean"),
    "margin_ranking_loss": lambda y, x: F.margin_ranking_loss(y, x.expand(2, 3), torch.ones(2, 3)),
    "margin_ranking_loss, whole numbers": lambda y, x: F.margin_ranking_loss(y[0], x, 2 * (x > 0).long() - 1),
    "triplet_margin_loss": lambda y, x: F.triplet_margin_loss(y, x.expand(2, 3), y.detach() + 1),
    "stft": lambda y, x: torch.stft(y, 4, 1, window=torch.ones(4, dtype=F64), return_complex=True).abs().square().sum(),
    "column_stack": lambda y, x: torch.column_stack([y.T, x]).tanh().sum(),
    "diagflat": lambda y, x: (torch.diagflat(y[0]) @ x).tanh().sum(),
    "tensorsolve": lambda y, x: torch.linalg.tensorsolve(torch.outer(x, y[0]) + 9 * torch.eye(3), x).sum(),
    "data alone": lambda y, x: y.sum().square() * F.kl_div(x.log_softmax(-1), x.softmax(-1), reduction="sum"),
}


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("case", WITHIN_A_DERIVATIVE)
def test_what_torch_batches_within_a_derivative(found, case, grad):
    """Warnings are errors here, so that a loop over samples would be a refusal."""

    def loss(p, x):
        y = torch.outer(p["b"] @ (p["a"] @ x).tanh(), p["t"] + x)
        with torch.set_grad_enabled(grad):
            value = WITHIN_A_DERIVATIVE[case](y, x)
        return value + y.square().sum()

    x = draw(5, 3, seed=5)
    truth = expected(loss, WEIGHTS, (x,))
    assert_trees_close(per_sample_grads(loss, WEIGHTS, x, REDUCTIONS), truth, rtol=1e-9)
    assert None in found


def counted(p, x):
    return F.linear(x, p["w"]).sum() + sum(value.square().sum() for value in p.values() if value.requires_grad) / 2


def asked(p, x):
    hidden = F.linear(x, p["w"])
    return F.linear(2 * hidden if hidden.requires_grad else hidden, p["v"]).square().sum()


def asked_leaf(p, x):
    hidden = F.linear(x, p["w"])
    return (hidden if hidden.is_leaf else 3 * hidden).square().sum()


def hooked(p, x):
    p["w"].register_hook(lambda grad: None if grad is None else 2 * grad)
    return F.linear(x, p["w"]).square().sum()


@pytest.mark.parametrize(
    ("loss", "most"), [(multiplied, 1), (decayed, 1), (masked, 1), (asked, 2)], ids=lambda x: getattr(x, "__name__", x)
)
def test_how_often_a_loss_is_called(loss, most):
    calls = []
    counted = lambda *args: calls.append(1) or loss(*args)
    results = [per_sample_grads(counted, W, draw(5, 3), Mean()) for _ in range(3)]
    assert len(calls) == 3 * most
    assert all(torch.equal(results[0][name], result[name]) for result in results for name in W)


def test_closures_of_one_factory_are_judged_apart(found):
    """What is decided about one loss says nothing of another with the same code."""

    def factory(asks):
        def loss(p, x):
            rest = (p["w"] * x).sum() * p["w"].requires_grad if asks else 0
            return F.linear(torch.tanh(F.linear(x, p["w"])), p["v"]).sum() + rest

        return loss

    x = draw(5, 3)
    for asks in (True, False, True, False):
        loss = factory(asks)
        assert_trees_close(per_sample_grads(loss, W, (x,), REDUCTIONS), expected(loss, W, (x,)), rtol=1e-9)
    assert [result is None for result in found] == [True, False, True, False]


def test_the_first_call_gives_the_bits_of_all_others():
    model, x = mlp(8, 16, 16, 2).float(), draw(32, 8).float()

    def loss(model, x):
        return model(x).square().sum()

    first, second = (per_sample_grads(loss, model, x, ClippedMean(0.1)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


class Loose(nn.Module):
    """A matrix of its own beside a layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.matrix = nn.Linear(3, 2), nn.Parameter(torch.ones(3, 3))

    def forward(self, x):
        return self.layer(F.linear(x, self.matrix))


class Embedded(nn.Module):
    """A table that is an output layer as well."""

    def __init__(self):
        super().__init__()
        self.output, self.table = nn.Linear(3, 4, bias=False), nn.Embedding(4, 3)
        self.output.weight = self.table.weight

    def forward(self, x):
        return self.output(x)


@pytest.mark.parametrize(
    ("params", "tried"),
    [
        (mlp(3, 4, 2), True),
        ([mlp(3, 2), torch.zeros((), dtype=F64)], True),
        ([mlp(3, 2), torch.zeros(2, 3, dtype=F64)], True),
        (dict(mlp(3, 2).named_parameters()), True),
        (Loose().double(), True),
        (Embedded().double(), True),
        (nn.MultiheadAttention(3, 1).double(), True),
        (nn.Conv1d(3, 2, 1).double(), True),
        (nn.GRUCell(3, 2).double(), True),
    ],
    ids=[
        "layers",
        "and a number",
        "and a matrix",
        "no modules",
        "loose",
        "tied to a table",
        "attention",
        "convolution",
        "recurrent",
    ],
)
def test_which_parameters_may_be_of_layers(found, params, tried):

    def loss(p, x):
        parts = p if isinstance(p, list) else p.values() if isinstance(p, dict) else [p]
        leaves = [y for part in parts for y in (part.parameters() if isinstance(part, nn.Module) else [part])]
        return sum(x.sum() * leaf.sum() for leaf in leaves)

    per_sample_grads(loss, params, draw(4, 3), Mean())
    assert [result is None for result in found] == [False] * tried


def test_chunks_take_the_short_way(found):
    def loss(model, x):
        return model(x).square().sum()

    model, x = mlp(3, 4, 2), draw(6, 3)
    grads = per_sample_grads(loss, model, x, Mean(), chunk_size=2)
    assert len(found) == 3
    assert None not in found
    assert_trees_close(grads, expected(loss, model, (x,))["mean"], rtol=1e-9)


@pytest.mark.parametrize(
    "params",
    [
        {**W, "complex": torch.zeros(2, dtype=torch.complex128)},
    ],
    ids=["complex"],
)
def test_parameters_that_are_not_looked_at(found, params):
    def loss(p, x):
        return sum((value.abs().sum() for value in p.values()), x.sum())

    x = draw(5, 3)
    rows = oracle(loss, params, (x,))
    assert_trees_close(per_sample_grads(loss, params, x), rows.tree(rows.grads), rtol=1e-6)
    assert not found


@pytest.mark.parametrize(
    "params",
    [{**W, "narrow": torch.ones(2)}, {"w": draw(3)}, {"w": torch.ones(())}],
    ids=["dtypes", "vector", "number"],
)
def test_parameters_of_any_kind(found, params):
    def loss(p, x):
        return sum((x.sum() * value.square().sum().double() for value in p.values()), x.sum())

    x = draw(5, 3)
    rows = oracle(loss, params, (x,))
    assert_trees_close(per_sample_grads(loss, params, x), rows.tree(rows.grads), rtol=1e-6)
    assert None not in found
    assert found


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_random_numbers_are_those_of_vmap(found, randomness):
    def loss(model, x):
        return F.dropout(model(x), 0.5).square().sum()

    model, x = mlp(3, 4, 2), draw(6, 3)
    results = []
    for differentiated in (False, True):  # the caller's derivatives pass through vmap(vjp)
        torch.manual_seed(0)
        options = {"differentiable": True} if differentiated else {}
        results.append(per_sample_grads(loss, model, x, randomness=randomness, **options))
    assert_trees_close(*results, rtol=1e-9)
    assert len(found) == 1
    assert None not in found


def test_refused_losses_draw_the_same_random_numbers(found):
    def loss(model, x):
        mask = torch.bernoulli(torch.full((2,), 0.5, dtype=F64))
        return (mask * model(x)).square().sum() + func_grad(lambda w: (w**2).sum())(model[0].weight).sum()

    model, x, results = mlp(3, 2), draw(6, 3), []
    for options in ({}, {"differentiable": True}):
        torch.manual_seed(0)
        results.append(per_sample_grads(loss, model, x, randomness="different", **options))
    assert_trees_close(*results, rtol=1e-9)
    assert found == [None]


def test_under_autocast(found):
    with torch.autocast("cpu", torch.bfloat16):
        factors = per_sample_grads(square, nn.Linear(3, 2), draw(5, 3).float(), Factored())
    assert type(factors["weight"]).__name__ == "Outer"
    assert None not in found


def test_under_a_transform_the_long_way(found):
    loss, model, batch = LAYERS["td"]
    params = dict(copy.deepcopy(model).named_parameters())

    def outer(s):
        return per_sample_grads(lambda p, *b: td(lambda s: functional_call(model, p, s), *b), params, s, Norm())

    many = tuple(torch.stack([x, 2 * x]) for x in batch)
    result = vmap(outer)(many)
    assert_trees_close(result[0], expected(loss, model, batch)["norm"], rtol=1e-9)
    assert not found


# Mistakes


def test_an_input_changed_after_its_use_is_no_silent_number():
    def loss(p, x):
        row = 2 * x  # that nothing but the layer needs again
        out = F.linear(torch.tanh(F.linear(row, p["w"])), p["v"]).sum()
        row.mul_(2)
        return out

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        oracle(loss, W, (draw(5, 3),))
    with pytest.raises((LossError, RuntimeError), match=r"inplace operation|in place"):
        per_sample_grads(loss, W, draw(5, 3), Mean())


@pytest.mark.parametrize("loss", [counted, asked, asked_leaf, hooked], ids=lambda f: f.__name__)
def test_what_asks_how_it_is_differentiated_is_answered(loss):
    params, x = {**W, "b": draw(2, seed=5)} if loss is counted else W, draw(5, 3)
    truth = per_sample_grads(loss, params, x, Mean(), engine="loop")
    for _ in range(2):
        assert_trees_close(per_sample_grads(loss, params, x, Mean()), truth, rtol=1e-9)


def test_hooks_of_modules_are_no_silent_number():
    model, x = mlp(3, 4, 2), draw(5, 3)
    per_sample_grads(square, model, x)
    model[2].register_full_backward_hook(lambda module, given, made: (given[0].clamp(-0.1, 0.1),))
    with pytest.raises(LossError):
        per_sample_grads(square, model, x, Mean())
    assert_trees_close(
        per_sample_grads(square, model, x, Mean(), engine="loop"), expected(square, model, (x,))["mean"], rtol=1e-9
    )


@pytest.mark.parametrize("reduction", [Variance(), Stack(), ClippedMean(1.0)], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("layer", [F.linear, F.conv1d], ids=["linear", "convolution"])
def test_autocast_inside_the_loss(layer, reduction):
    def loss(p, x):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = layer(x, p["w"], p["b"])
        assert hidden.dtype == torch.bfloat16
        return hidden.float().square().sum()

    kernel = (64, 48) if layer is F.linear else (64, 4, 3)
    params = {"w": draw(*kernel).float(), "b": draw(64).float()}
    x = draw(5, 4, 48).float()
    truth = per_sample_grads(loss, params, x, reduction, engine="loop")
    for _ in range(3):
        assert_trees_close(per_sample_grads(loss, params, x, reduction), truth, rtol=0.02)


def test_places_in_memory_are_told(found):
    """``nn.GRU`` on a GPU asks for those of its weights."""

    def loss(model, x):
        assert len({w.data_ptr() for w in model.parameters()}) == 4
        return model(x).square().sum()

    model, x = mlp(3, 4, 2), draw(5, 3)
    assert_trees_close(
        per_sample_grads(loss, model, x, Norm()), per_sample_grads(loss, model, x, Norm(), engine="loop"), 1e-9
    )
    assert found[0] is not None


def ratio(x, y):
    """2 where two tensors begin at the same place in memory, else 3."""
    return 2.0 if x.data_ptr() == y.data_ptr() else 3.0


# What reads strides, memory or identity, of copies of vectors, results of layers, and what is computed of matrices.
OF_MEMORY = {
    "as_strided": lambda p, x, h: p["b"].as_strided((3,), (1,)),
    "as_strided, function": lambda p, x, h: torch.as_strided(p["b"], (3,), (1,)),
    "as_strided, by names": lambda p, x, h: torch.as_strided(input=p["b"], size=(3,), stride=(1,)),
    "as_strided, of aten": lambda p, x, h: torch.ops.aten.as_strided.default(p["b"], (3,), (1,)),
    "as_strided, packet": lambda p, x, h: torch.ops.aten.as_strided(p["b"], (3,), (1,)),
    "as_strided, overlapping": lambda p, x, h: p["b"].as_strided((2, 2), (1, 1)).sum(),
    "as_strided, of a number": lambda p, x, h: p["s"].as_strided((3,), (0,)),
    "as_strided, of a view": lambda p, x, h: p["b"][None].as_strided((2, 3), (0, 1)).sum(0),
    "as_strided, of a row": lambda p, x, h: p["w"][1].as_strided((3,), (1,)),
    "as_strided, of a matrix": lambda p, x, h: p["w"].as_strided((3,), (4,)),
    "as_strided, with an offset": lambda p, x, h: p["b"].as_strided((2,), (1,), 1).sum(),
    "as_strided_": lambda p, x, h: p["b"].clone().as_strided_((3,), (1,)),
    "as_strided_copy": lambda p, x, h: torch.as_strided_copy(p["b"], (3,), (1,)),
    "as_strided_scatter": lambda p, x, h: torch.as_strided_scatter(p["b"], p["b"][:2] * 2, (2,), (1,)),
    "written by strides": lambda p, x, h: (y := p["b"] + 1, y.as_strided((2,), (1,)).mul_(2))[0],
    "stride": lambda p, x, h: (p["w"] @ torch.outer(x, C)).stride()[0] * p["b"],
    "stride of aten": lambda p, x, h: torch.ops.aten.stride(p["w"] @ torch.outer(x, C))[0] * p["b"],
    "dim_order": lambda p, x, h: (p["w"] @ torch.outer(x, C)).dim_order()[0] * p["b"],
    "is_contiguous": lambda p, x, h: p["b"] * (1.0 if (p["w"] @ torch.outer(x, C)).is_contiguous() else 2.0),
    "storage_offset": lambda p, x, h: p["b"] * (1.0 + p["b"][1:].storage_offset()),
    "untyped_storage": lambda p, x, h: p["b"] * p["b"].untyped_storage().nbytes(),
    "is_set_to": lambda p, x, h: p["b"] * (2.0 if p["b"].is_set_to(p["b"].view(3)) else 3.0),
    "data_ptr of a view": lambda p, x, h: p["b"] * ratio(p["b"][1:], p["b"]),
    "data_ptr of a copy": lambda p, x, h: p["b"] * ratio(p["b"].clone(), p["b"]),
    "data_ptr of a result": lambda p, x, h: p["b"] * ratio(y := p["w"] @ torch.outer(x, C), y.contiguous()),
    "data_ptr of a transpose": lambda p, x, h: p["b"] * ratio(p["w"].T, p["w"].T.contiguous()),
    "view of another dtype": lambda p, x, h: p["b"] * p["b"].view(torch.int64).sign(),
    "_base": lambda p, x, h: p["b"] * (2.0 if p["b"].view(3, 1)._base is p["b"] else 3.0),
    "_is_view": lambda p, x, h: p["b"] * (2.0 if p["w"][0]._is_view() else 3.0),
    "identity of a transpose": lambda p, x, h: p["b"] * (2.0 if p["w"].T.T is p["w"] else 3.0),
    "identity of what is contiguous": lambda p, x, h: p["b"] * (2.0 if p["b"].contiguous() is p["b"] else 3.0),
    "identity after a write": lambda p, x, h: p["b"] * (2.0 if (y := p["w"] * x).mul_(2) is y else 3.0),
}


@pytest.mark.parametrize("read", OF_MEMORY)
def test_strides_memory_and_identity_are_those_of_the_loop(read):
    def loss(p, x):
        h = p["w"] @ x
        return (h * OF_MEMORY[read](p, x, h)).tanh().sum()

    params = {"w": draw(3, 3), "b": draw(3, seed=1), "s": draw(1, seed=2)[0]}
    truth = per_sample_grads(loss, params, draw(4, 3), engine="loop")
    assert_trees_close(per_sample_grads(loss, params, draw(4, 3)), truth, rtol=1e-9)


@pytest.mark.parametrize(
    "read",
    [
        lambda h: h.stride()[0],
        lambda h: h[1:].storage_offset(),
        lambda h: h.untyped_storage().nbytes(),
        lambda h: h.as_strided((3,), (1,)),
        lambda h: torch.as_strided_scatter(h, h[:2], (2,), (1,)),
    ],
    ids=["stride", "storage_offset", "untyped_storage", "as_strided", "as_strided_scatter"],
)
def test_strides_and_memory_that_one_sample_does_not_have_are_refused(read):
    def loss(p, x):
        h = p["w"] @ x
        return (h * p["b"] * read(h)).sum()

    with pytest.raises(LossError, match=r"reads memory by strides|reads values of a sample"):
        per_sample_grads(loss, {"w": draw(3, 3), "b": draw(3)}, draw(4, 3))


def doubled(y):
    return y.mul_(2).sin()


TANGENTS = {
    "a vector": lambda p, x: p["b"].detach(),
    "a number": lambda p, x: p["s"].detach().expand(3),
    "a result of a vector": lambda p, x: p["b"] * 2,
    "part of a matrix": lambda p, x: p["w"][1],
    "a result of the batch": lambda p, x: x.cos(),
}


@pytest.mark.parametrize("tangent", TANGENTS)
def test_writes_into_what_is_differentiated_forward(tangent):
    def loss(p, x, write=True):
        h = p["w"] @ x
        both = jvp(doubled if write else lambda y: (2 * y).sin(), (3 * h,), (TANGENTS[tangent](p, x),))
        return (torch.cat(both) * p["s"]).tanh().sum()

    params, x = {"w": draw(3, 3), "b": draw(3, seed=1), "s": draw(1, seed=2)[0]}, draw(4, 3)
    before = copy.deepcopy(params)
    truth = per_sample_grads(functools.partial(loss, write=False), params, x, engine="loop")
    assert_trees_close(per_sample_grads(loss, params, x), truth, rtol=1e-9)
    assert all(torch.equal(params[name], before[name]) for name in params)


def written_second_derivative(p, x):
    zeros = jvp(lambda y: jvp(lambda z: torch.outer(C, z)[0], (y,), (x,))[1], (C,), (x,))[1]
    zeros[0] = x[1]
    return zeros


WRITTEN_TOGETHER = {
    "expanded": lambda p, x: p["s"].expand(3).mul_(x),
    "a derivative that is zero": written_second_derivative,
    "expanded, and differentiated": lambda p, x: jvp(torch.sin, (p["s"].expand(3),), (x,))[1],
}


@pytest.mark.parametrize("case", WRITTEN_TOGETHER)
def test_writes_into_places_that_elements_share_are_explained(case):
    with pytest.raises(LossError, match=r"(writes|wrote) (per-sample values )?in place into"):
        per_sample_grads(
            lambda p, x: (WRITTEN_TOGETHER[case](p, x) * (p["w"] @ x)).sum(),
            {"w": draw(3, 3), "s": draw(1)[0]},
            draw(4, 3),
        )


def test_the_weights_of_an_lstm_share_the_inner_products_of_their_signals():
    lstm, x = nn.LSTM(24, 32), torch.randn(30, 14, 24)
    counted = operations(lambda: per_sample_grads(lambda model, x: model(x)[0].square().sum(), lstm, x, Norm()))
    assert sorted(left[2] for left, _ in counted.shapes["bmm"]) == [24, 32, 4 * 32]


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("reduction", [Stack(), ClippedMean(1.0)], ids=lambda r: type(r).__name__)
def test_autocast_inside_the_loss_around_recurrent_layers(kind, reduction):
    def loss(model, x, autocast=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            hidden = model(x)[0]
        return hidden.float().square().sum()

    torch.manual_seed(0)
    model, x = kind(3, 8, batch_first=True), draw(5, 6, 3).float()
    # In float32: oneDNN has bfloat16 LSTMs for processors with AVX-512 alone.
    truth = per_sample_grads(functools.partial(loss, autocast=False), model, x, reduction, engine="loop")
    for _ in range(3):
        assert_trees_close(per_sample_grads(loss, model, x, reduction), truth, rtol=0.05)


@pytest.mark.parametrize("steps", [(), (4,), (2, 3)], ids=str)
def test_in_place_activations_of_large_layers(found, steps):
    model = mlp(16, 32, 32, 2, between=lambda: nn.ReLU(inplace=True))
    x = draw(64, *steps, 16)
    result = per_sample_grads(square, model, x, Mean())
    assert_trees_close(result, expected(square, model, (x,))["mean"], rtol=1e-9)
    assert None not in found


@pytest.mark.parametrize(
    ("sizes", "batch", "twice"),
    [((30, 1), 1, False), ((30, 1), 8, False), ((1, 8), 8, False), ((30, 1), 4096, False), ((6, 1), 8, True)],
    ids=str,
)
def test_explain_says_what_is_done(found, sizes, batch, twice):
    def loss(model, x):
        return model(x).square().sum() * (model(2 * x).sum() if twice else 1)

    model, x = mlp(*sizes), draw(batch, sizes[0])
    for reduction in (Mean(), ClippedMean(1.0), Norm()):
        factors = per_sample_grads(loss, model, x, (Factored(), reduction))[0]
        rows = explain(loss, model, x, (Factored(), reduction)).rows
        assert [type(factor).__name__ for factor in factors.values()] == [
            "Dense" if row.choice == "materialize" else row.factor for row in rows
        ]
    assert None not in found


INNER = {
    "through layers": lambda p, x, y, h: torch.autograd.grad(y, h, create_graph=True)[0].square().sum(),
    "as a number": lambda p, x, y, h: (torch.autograd.grad(y, h, retain_graph=True)[0].detach() * y).sum(),
    "of a weight": lambda p, x, y, h: torch.autograd.grad(y, p["w"], create_graph=True)[0].square().sum(),
}


@pytest.mark.parametrize("inner", INNER)
def test_autograd_inside_the_loss(inner):
    def loss(p, x):
        h = F.linear(x, p["w"])
        return INNER[inner](p, x, F.linear(torch.tanh(h), p["v"]).sum(), h)

    x = draw(5, 3)
    for _ in range(3):
        assert_trees_close(per_sample_grads(loss, W, (x,), REDUCTIONS), expected(loss, W, (x,)), rtol=1e-9)


WRITES = {
    "add_": lambda x: x.add_(1),
    "iadd": lambda x: x.__iadd__(1),
    "setitem": lambda x: x.__setitem__(0, 5),
    "inplace": lambda x: F.silu(x, inplace=True),
    "inplace, positional": lambda x: F.leaky_relu(x, 0.1, True),
    "module": nn.ReLU(inplace=True),
    "aten": lambda x: torch.ops.aten.mul_.Tensor(x, 2),
    "view": lambda x: x.view(-1).mul_(2),
    "element": lambda x: x[0].mul_(2),
}


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("into", ["batch", "closure"])
def test_writes_into_what_was_not_computed_inside_are_refused(into, write, grad):
    closed_over, x = C.clone(), draw(5, 3)
    before = x.clone()

    def loss(p, x):
        with torch.set_grad_enabled(grad):
            WRITES[write](x if into == "batch" else closed_over)
        return F.linear(x * closed_over, p["w"]).sum()

    with pytest.raises((LossError, RuntimeError)):
        per_sample_grads(loss, {"w": W["w"]}, x, Mean())
    assert torch.equal(closed_over, C)
    assert torch.equal(x, before)


def test_a_table_is_not_renormalized():
    table = 3 * C.expand(4, 3).clone()

    def loss(p, x):
        return F.linear(x * F.embedding(torch.tensor([1]), table, max_norm=0.1)[0], p["w"]).sum()

    with pytest.raises((LossError, RuntimeError)):
        per_sample_grads(loss, {"w": W["w"]}, draw(5, 3), Mean())
    assert (table == 3).all()


def test_a_write_into_the_batch_is_refused_before_it_is_done():
    def loss(p, x):
        return F.linear(x.mul_(2), p["w"]).sum()

    x = draw(5, 3)
    before = x.clone()
    with pytest.raises(LossError, match="in place"):
        per_sample_grads(loss, {"w": W["w"]}, x, Mean())
    assert torch.equal(x, before)


def test_the_users_own_error_is_the_users_own():
    def loss(p, x):
        F.linear(x, p["w"])
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        per_sample_grads(loss, {"w": W["w"]}, draw(5, 3), Mean())


MISTAKES = {
    "no input": lambda p, x: F.linear(None, p["w"]),
    "no weight": lambda p, x: F.linear(x, None, p["b"]),
    "a number as bias": lambda p, x: F.linear(x, p["w"], 1.0),
    "a list": lambda p, x: p["w"] @ [1.0, 2.0, 3.0],
    "a number": lambda p, x: x @ p["w"] @ 2.0,
    "a list of indices": lambda p, x: F.embedding([0, 1], p["w"]),
    "an index out of range": lambda p, x: F.embedding(torch.tensor([9]), p["w"]),
    "a float as index": lambda p, x: F.embedding(x, p["w"]),
    "no tensor to write": lambda p, x: torch.relu_() + p["w"].sum(),
    "a bad index": lambda p, x: p["w"][7],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_of_torch_are_those_of_the_loop(mistake):
    errors = []
    for engine in ("loop", "eager"):
        with pytest.raises((TypeError, RuntimeError, IndexError, AttributeError)) as raised:
            per_sample_grads(MISTAKES[mistake], MATRICES, draw(5, 3), Mean(), engine=engine)
        errors.append((type(raised.value), str(raised.value).splitlines()[0][:40]))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("x", [draw(5, 4), draw(5, 3).float()], ids=["shape", "dtype"])
def test_what_does_not_fit_is_an_error(x):
    def loss(p, x):
        return F.linear(x, p["w"]).sum()

    with pytest.raises(RuntimeError, match=r"shapes|dtype"):
        per_sample_grads(loss, {"w": W["w"]}, x, Mean())


def test_variance_of_one_layer():
    model, x = nn.Linear(3, 2).double(), draw(6, 3)
    rows = oracle(square, model, (x,))
    truth = rows.tree([grad.var(0) for grad in rows.grads])
    assert_trees_close(per_sample_grads(square, model, x, Variance()), truth, rtol=1e-9)


# Tables, and matrices that are added


class Model(nn.Module):
    """A small causal language model: a table that is the last layer, too, positions that are added, attention."""

    def __init__(self, vocabulary=700, padding_idx=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary, 4, padding_idx=padding_idx)
        self.position = nn.Parameter(torch.randn(6, 4))
        self.norm, self.qkv, self.out = nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(4, 4)
        self.double()

    def hidden(self, tokens):
        x = self.embed(tokens) + self.position
        q, k, v = (y.unflatten(-1, (2, 2)).transpose(-3, -2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(-3, -2).flatten(-2))

    def forward(self, tokens):
        return F.linear(self.hidden(tokens), self.embed.weight)


class Numbered(nn.Module):
    """Positions that are looked up in a table by what all samples share, and added by hand."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(9, 4, padding_idx=-9), nn.Embedding(6, 4)
        self.shift, self.last = nn.Parameter(torch.randn(1, 6, 1, 4)), nn.Linear(4, 3)
        self.double()

    def forward(self, tokens):
        x = self.words(tokens.int()) + self.places(torch.arange(6))
        x = torch.add(x.unsqueeze(1), self.shift, alpha=2).squeeze(0)
        x += self.words(tokens[0])
        return self.last(torch.tanh(self.shift + x))


def tokens(*shape, below=9):
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(0))


def next_token(model, tokens):
    return F.cross_entropy(model(tokens[:-1]), tokens[1:])


def hidden(model, tokens):
    return model.hidden(tokens).square().sum()


def first_steps(model, tokens):
    x = model.embed(tokens[: len(model.position) - 2])
    x += model.position[: x.shape[0]]
    return model.out(model.position[-1] + x + model.position[None, 1, :]).square().sum()


def multiplied_positions(model, tokens):
    return model.out(model.position.T @ model.embed(tokens)).square().sum()


TABLES = {
    "tied": (next_token, Model(), (tokens(5, 7, below=700),)),
    "tied, few classes": (next_token, Model(9), (tokens(5, 7),)),
    "padding": (next_token, Model(9, padding_idx=2), (tokens(5, 7, below=4),)),
    "one sample": (next_token, Model(), (tokens(1, 7, below=700),)),
    "table alone": (hidden, Model(), (tokens(3, 6),)),
    "parts": (first_steps, Model(), (tokens(3, 6),)),
    "multiplied": (multiplied_positions, Model(9), (tokens(3, 6),)),
    "numbered": (square, Numbered(), (tokens(5, 6),)),
    "of scalars": (square, nn.Sequential(nn.Embedding(9, 3), nn.Tanh(), nn.Linear(3, 2)).double(), (tokens(8),)),
    "of more axes": (square, nn.Sequential(nn.Embedding(9, 3), nn.Linear(3, 2)).double(), (tokens(4, 2, 3).mT,)),
}


@pytest.mark.parametrize("chunk_size", [None, 2], ids=["whole", "chunks"])
@pytest.mark.parametrize("case", TABLES)
def test_losses_with_tables(found, case, chunk_size):
    loss, params, batch = TABLES[case]
    truth = expected(loss, params, batch)
    for name, reduction in REDUCTIONS.items():
        result = per_sample_grads(loss, params, batch, reduction, chunk_size=chunk_size)
        assert_trees_close(result, truth[name], rtol=1e-9)
    assert_trees_close(per_sample_grads(loss, params, batch, REDUCTIONS, chunk_size=chunk_size), truth, rtol=1e-9)
    assert found
    assert None not in found


def test_gradients_of_tables_are_not_written_out(found):
    model = nn.Sequential(nn.Embedding(50_000, 4), nn.Linear(4, 2)).double()
    factors = per_sample_grads(square, model, tokens(3, 5, below=50_000), Factored())
    assert {name: type(x).__name__ for name, x in factors.items()} == {
        "0.weight": "Embedding",
        "1.weight": "Outer",
        "1.bias": "Dense",
    }
    assert None not in found


def decayed_table(model, tokens):
    return hidden(model, tokens) + model.embed.weight.square().sum()


def indexed_table(model, tokens):
    return hidden(model, tokens) + model.embed.weight[tokens].exp().sum()


def by_frequency(model, tokens):
    x = F.embedding(tokens, model.embed.weight, scale_grad_by_freq=True)
    return model.out(x + model.position).square().sum()


def doubled_table(model, tokens):
    return model.out(F.embedding(tokens, 2 * model.embed.weight)).square().sum()


def scaled_positions(model, tokens):
    return model.out(model.embed(tokens) * model.position).square().sum()


def summed_matrices(model, tokens):
    return model.out(model.embed(tokens)).square().sum() + (model.position + torch.ones(6, 4, dtype=F64)).sin().sum()


def by_keyword(model, tokens):
    return torch.matmul(model.embed(tokens).T, other=model.position).square().sum()


def in_a_list(model, tokens):
    return torch.einsum("ti,tj->ij", [model.embed(tokens), model.position]).square().sum()


def multiplied_part(model, tokens):
    return model.out(model.position[:4].T @ model.embed(tokens)[:4]).square().sum()


def sum_of_parameters(model, tokens):
    return model.out(model.embed(tokens)).square().sum() + (model.position + model.norm.bias).sin().sum()


def curved(model, tokens):
    x = model.embed(tokens)
    (slope,) = torch.autograd.grad(model.out(torch.tanh(x)).sum(), x, create_graph=True)
    return slope.square().sum() + hidden(model, tokens)


OTHER_USES = [
    *(indexed_table, by_frequency, scaled_positions, by_keyword, in_a_list, curved),
    *(decayed_table, doubled_table, summed_matrices, multiplied_part, sum_of_parameters),
]


@pytest.mark.parametrize("loss", OTHER_USES, ids=lambda f: f.__name__)
def test_other_uses_of_tables_and_matrices(found, are_small, loss):
    model, batch = Model(9), (tokens(5, 6),)
    truth = expected(loss, model, batch)
    assert_trees_close(per_sample_grads(loss, model, *batch, REDUCTIONS), truth, rtol=1e-9)
    assert None in found or loss is not curved


def test_rows_beyond_a_table():
    with pytest.raises((IndexError, LossError), match="index out of range"):
        per_sample_grads(hidden, Model(9), tokens(5, 6) + 4, Mean())


def test_dropping_results_keeps_no_memory():
    """What saves its own results must not hold itself: the graph is freed with the last reference to it."""
    w, batch = torch.rand(3, 4), torch.rand(5, 3, 4)
    gc.disable()
    try:
        with Operations() as mode:
            per_sample_grads(lambda w, x: torch.cdist(w * x, 2 * w, p=1.0).sum(), w, batch, Mean())
        assert len(mode.results) > 5
        assert not [x for x in mode.results if x() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("engine", ["eager", "traced", "compiled"])
def test_a_kernel_written_out_beside_products(engine):
    """The compiled program of one sample returned a tensor without memory."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"kernel": (2, 2, 2, 1, 2), "bias": (2,), "head": (4, 2, 2), "x": (2, 2, 4, 3, 4)}
    params = {name: torch.randn(*size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}
    batch = params.pop("x")

    def loss(p, x):
        volumes = F.conv3d(x[None], p["kernel"], p["bias"], 3, (2, 0, 0), (1, 2, 2))[0]
        return (p["head"] @ volumes.mean((1, 2, 3))).sin().sum()

    for reduction in (Gram(), Norm(), NaturalGradient(0.1)):
        found, expected = (
            per_sample_grads(loss, params, batch, reduction, chunk_size=1, engine=e) for e in (engine, "loop")
        )
        assert_trees_close(found, expected, 1e-9)


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, x: (torch.inner(p["w"], x) * torch.arange(25.0).view(5, 5)).sum(),
        lambda p, x: (x.inner(p["w"]) * torch.arange(25.0).view(5, 5)).sum(),
        lambda p, x: (p["w"].inner(x[0]) * torch.arange(5.0)).sum(),
    ],
    ids=["matrices", "layer", "vector"],
)
def test_inner_products(loss):
    params, x = {"w": draw(5, 4)}, draw(3, 5, 4)
    assert_trees_close(per_sample_grads(loss, params, x)["w"], expected(loss, params, (x,))["stack"]["w"], rtol=1e-9)


@pytest.mark.parametrize(
    "write",
    [
        torch.vmap(lambda row: row.add_(1)),
        lambda buffer: torch.reshape(input=buffer, shape=(2, 1)).add_(1),
        lambda buffer: torch.einsum("i->i", [buffer]).add_(1),
    ],
    ids=["vmap", "keyword", "list"],
)
def test_writes_into_closures_in_any_guise_are_refused(write):
    buffer = torch.zeros(2, dtype=F64)

    def loss(model, x):
        write(buffer)
        return (model(x) * buffer).sum()

    with pytest.raises(LossError, match="writes in place into its arguments, or into a tensor it closed over"):
        per_sample_grads(loss, mlp(3, 2), draw(4, 3))


def test_masks_of_the_loss_may_be_written_into(found):
    def loss(model, x):
        mask = torch.zeros(2, dtype=F64)
        mask[0] = 1
        mask.view(1, 2).mul_(3)
        return (model(x) * mask).square().sum()

    model, x = mlp(3, 2), draw(4, 3)
    assert_trees_close(per_sample_grads(loss, model, x, Mean()), expected(loss, model, (x,))["mean"], rtol=1e-9)
    assert None not in found


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN], ids=lambda kind: kind.__name__)
def test_outputs_of_recurrent_layers(found, kind):
    model, x = kind(3, 4, batch_first=True).double(), draw(5, 6, 3)

    def rows(model, x):
        return model(x)[0][-1].sin()

    results = [per_sample_grads(rows, model, x, outputs="rows", engine=engine) for engine in ("eager", "loop")]
    assert_trees_close(*results, rtol=1e-9)
    assert len(found) == 1
    assert None not in found


def test_layers_under_a_vmap_of_the_loss(found):
    def loss(model, x):
        return torch.vmap(lambda row: torch.vmap(model, in_dims=1)(row).square().sum(), in_dims=2)(x).sin().sum()

    model, x = mlp(3, 4, 2), draw(5, 3, 6, 2)
    factors = per_sample_grads(loss, model, x, Factored())
    assert {type(factor).__name__ for factor in factors.values()} == {"Outer", "Dense"}
    assert None not in found
    assert_trees_close(per_sample_grads(loss, model, x), expected(loss, model, (x,))["stack"], rtol=1e-9)


# Losses that are one call of torch's kernel for all samples, and spellings that are not.
LOSSES_OF_ROWS = {
    "mse": lambda h, y, _: F.mse_loss(h, y),
    "mse, sum": lambda h, y, _: F.mse_loss(h, y, reduction="sum"),
    "mse, none": lambda h, y, _: F.mse_loss(h, y, reduction="none").sum(),
    "mse, weights": lambda h, y, _: F.mse_loss(h, y, weight=y.square()),
    "mse, one target for all": lambda h, _y, _: F.mse_loss(h, torch.ones_like(h)),
    "mse, broadcast": lambda h, y, _: F.mse_loss(h, y[:1].expand_as(h)),
    "mse, learned target": lambda h, _y, _: F.mse_loss(h, h.flip(0).cos()),
    "l1": lambda h, y, _: F.l1_loss(h, y),
    "smooth l1": lambda h, y, _: F.smooth_l1_loss(h, y, beta=0.3),
    "huber": lambda h, y, _: F.huber_loss(h, y, "sum", 0.2),
    "huber by name": lambda h, y, _: F.huber_loss(h, y, delta=0.2),
    "smooth l1 of numbers": lambda h, y, _: F.smooth_l1_loss(h.sum(), y.sum()),
    "entropy": lambda h, _y, a: F.cross_entropy(h, a),
    "entropy of one": lambda h, _y, a: F.cross_entropy(h[0], a[0]),
    "entropy, sum": lambda h, _y, a: F.cross_entropy(h, a, reduction="sum"),
    "entropy, none": lambda h, _y, a: F.cross_entropy(h, a, reduction="none").square().sum(),
    "entropy, ignored": lambda h, _y, a: F.cross_entropy(h, torch.where(a == a[0], a, -100)),
    "entropy, ignored class": lambda h, _y, a: F.cross_entropy(h, a.index_fill(0, torch.tensor(0), 3), ignore_index=1),
    "entropy, smoothed": lambda h, _y, a: F.cross_entropy(h, a, label_smoothing=0.1),
    "entropy, weights": lambda h, y, a: F.cross_entropy(h, a, weight=y[0].square()),
    "entropy of probabilities": lambda h, y, _: F.cross_entropy(h, y.softmax(-1)),
    "entropy of images": lambda h, _y, a: F.cross_entropy(h.mT.reshape(1, 5, 2, 2), a.view(1, 2, 2)),
    "entropy under vmap": lambda h, _y, a: torch.func.vmap(F.cross_entropy)(h, a).square().sum(),
    "mse under vmap": lambda h, y, _: torch.func.vmap(F.mse_loss, (0, 0))(h, y).square().sum(),
    "inside of grad": lambda h, y, _: h.sum() * torch.func.grad(lambda y: F.mse_loss(y, y.cos()))(y).sum(),
}


@pytest.mark.parametrize("outputs", ["scalar", "rows"])
@pytest.mark.parametrize("name", LOSSES_OF_ROWS)
def test_losses_of_rows(name, outputs):
    generator = torch.Generator().manual_seed(0)
    w, x, y = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((5, 3), (6, 4, 3), (6, 4, 5)))
    classes = torch.randint(5, (6, 4), generator=generator)

    def loss(w, *sample):
        x, y, a = sample
        value = LOSSES_OF_ROWS[name](torch.tanh(x @ w.T), y, a)
        return value if outputs == "scalar" else torch.stack([value, value.sin()])

    both = [per_sample_grads(loss, w, (x, y, classes), engine=each, outputs=outputs) for each in ("eager", "loop")]
    assert_trees_close(*both, 1e-12)


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_entropy_where_nothing_is_kept(engine):
    """As torch's: 0 / 0, with gradients of 0."""
    loss = lambda w, x, a: (F.cross_entropy(x @ w.T, a),) * 2
    batch = torch.randn(2, 4, 3), torch.tensor([[-100] * 4, [1, 0, -100, 1]])
    wanted = {"losses": Aux(), "grads": None}
    found = per_sample_grads(loss, torch.ones(2, 3), batch, wanted, engine=engine)
    assert found["losses"].isnan().tolist() == [True, False]
    assert not found["grads"][0].any()
    assert found["grads"][1].all()


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_classes_out_of_range(engine):
    loss = lambda w, x, a: F.cross_entropy(x @ w.T, a)
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        per_sample_grads(loss, torch.ones(2, 3), (torch.randn(2, 4, 3), torch.full((2, 4), 7)), engine=engine)
