"""Programs that a review broke: each was wrong or failed once on the eager engine, and is what the loop says now."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from agreement import assert_eager_is_loop
from oracle import assert_trees_close
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import persample as ps
from persample import LossError, per_sample_grads

D = torch.float64
WANTED = {"sum": ps.Sum(), "norm": ps.Norm(), "gram": ps.Gram(), "variance": ps.Variance(correction=0)}


def draw(*shape, dtype=D):
    return torch.randn(*shape, dtype=dtype)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def check(loss, params, batch, rtol=1e-9, wanted=WANTED, **options):
    assert_eager_is_loop(loss, params, batch, wanted, rtol, **options)


def recorded(first, only_penalty):
    def loss(w, x):
        value = first(w, x)
        (grad,) = torch.autograd.grad(value, w, create_graph=True)
        return grad.square().sum() + (0 if only_penalty else value)

    return loss


GRU = nn.GRU(6, 4).to(D).requires_grad_(requires_grad=False)
FIRST = {
    "GRU": lambda w, x: GRU(x @ w)[0].square().sum(),
    "SDPA": lambda w, x: F.scaled_dot_product_attention(*(x @ w).expand(3, 2, -1, -1)).square().sum(),
    "cross_entropy": lambda w, x: F.cross_entropy((x @ w).repeat(1, 200), torch.arange(len(x))),
}


@pytest.mark.parametrize("only_penalty", [False, True], ids=["sum", "penalty"])
@pytest.mark.parametrize("first", FIRST)
def test_gradients_recorded_inside_the_loss(first, only_penalty):
    with sdpa_kernel(SDPBackend.MATH):  # the loop differentiates no other kernel twice
        check(recorded(FIRST[first], only_penalty), draw(6, 6), draw(3, 5, 6))


def test_autocast_inside_the_loss():
    net = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 9))

    def loss(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return m(x).float().square().mean()

    check(loss, net, draw(6, 64, dtype=torch.float32), 3e-2, {"sum": ps.Sum(), "norm": ps.Norm()})


@pytest.mark.parametrize("name", ["Gram", "CosineSimilarity", "Project", "Dot"])
def test_autocast_around_the_call_is_for_the_loss_alone(name):
    w, x = draw(40, 30, dtype=torch.float32), draw(4, 30, dtype=torch.float32)
    reductions = {"Gram": ps.Gram(), "CosineSimilarity": ps.CosineSimilarity(), "Dot": ps.Dot(w)}
    reduction = reductions.get(name) or ps.Project(5, seed=0)
    for engine in ("eager", "loop"):
        plain = per_sample_grads(lambda w, x: (w * x).square().sum(), w, x, reduction, engine=engine)
        with torch.autocast("cpu", torch.bfloat16):
            cast = per_sample_grads(lambda w, x: (w * x).square().sum(), w, x, reduction, engine=engine)
        assert cast.dtype == torch.float32
        assert_trees_close(cast, plain, 1e-6)


def test_a_table_looked_up_and_used_transposed():
    def loss(p, i):
        return F.embedding(i, p["w"]).square().sum() + (p["w"].T @ p["c"]).square().sum()

    wanted = {name: WANTED[name] for name in ("sum", "norm", "gram")}
    check(loss, {"w": draw(20, 6), "c": draw(20)}, torch.randint(20, (7, 4)), wanted=wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_lora_pair_cast_before_its_use(dtype):
    def loss(p, x):
        return ((p["b"] @ p["a"]).to(dtype) @ x.to(dtype)).float().square().sum()

    params = {"b": draw(30, 4, dtype=torch.float32), "a": draw(4, 20, dtype=torch.float32)}
    check(loss, params, draw(5, 20, dtype=torch.float32), 2e-2 if dtype == torch.bfloat16 else 1e-4)


class ThroughNumpy(torch.autograd.Function):
    """The pattern of torch's documentation: NumPy inside, with a vmap rule."""

    @staticmethod
    def forward(x):
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        return ThroughNumpyBackward.apply(grad, ctx.saved_tensors[0])

    @staticmethod
    def vmap(info, in_dims, x):
        return ThroughNumpy.apply(x), in_dims[0]


class ThroughNumpyBackward(torch.autograd.Function):
    @staticmethod
    def forward(grad, x):
        return torch.from_numpy(grad.numpy() * np.cos(x.detach().numpy()))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, in_dims, grad, x):
        return ThroughNumpyBackward.apply(grad, x), in_dims[0]


def test_gradients_that_pass_through_numpy():
    check(lambda w, x: (ThroughNumpy.apply(w) @ x).square().sum(), draw(8, 9), draw(5, 9))


def test_logits_without_a_batch_axis():
    check(F.cross_entropy, draw(5000), torch.tensor([1, 2]))


def test_nothing_to_concatenate_or_to_look_up():
    check(lambda p, x: (torch.cat([p["w"], p["e"]]) @ x).square().sum(), {"w": draw(8, 9), "e": draw(0, 9)}, draw(5, 9))
    tokens = torch.zeros(5, 0, dtype=torch.long)
    check(lambda p, t: F.embedding(t, p["e"]).sum() + p["w"].sum(), {"w": draw(3), "e": draw(8, 9)}, tokens)


def hooked(change):
    def loss(w, x):
        y = w * 1
        y.register_hook(change)
        return (y @ x).square().sum()

    return loss


def test_hooks_that_change_gradients():
    def zeroed(g):
        g = g.clone()
        g[3, 1:].zero_()
        return g

    for change in (zeroed, lambda g: g.bfloat16().to(g.dtype), lambda g: g.clamp(-1, 1), lambda g: g.float().double()):
        check(hooked(change), draw(8, 9), draw(5, 9))


@pytest.mark.parametrize(("signal", "size"), [(1e-25, 1e25), (1e-23, 1e6), (1e-15, 1e10), (1e10, 1e-12)])
def test_operands_of_extreme_sizes_whose_product_is_ordinary(signal, size):
    w, x = torch.zeros(40, 30), torch.rand(4, 30) * size
    wanted = {"gram": ps.Gram(), "cosine": ps.CosineSimilarity(), "second": ps.SecondMoment(), "norm": ps.Norm()}
    check(lambda w, x: ((w @ x) * signal).sum(), w, x, 1e-4, wanted)


def test_failed_calls_leave_nothing_behind():
    refs = []

    def loss(w, x):
        refs.append(weakref.ref(w @ x))
        if x.sum() > 0:  # true of some samples
            return (w @ x).sum()
        return x.sum()

    gc.disable()
    try:
        with pytest.raises(LossError):
            per_sample_grads(loss, draw(8, 9), torch.stack([draw(9), -draw(9)]), ps.Norm())
        assert refs[0]() is None
    finally:
        gc.enable()


def test_a_call_leaves_nothing_behind():
    model, seen = nn.Linear(30, 40), []

    def loss(m, x):
        y = torch.tanh(m(x))
        seen.append(weakref.ref(y))
        return y.sum()

    gc.disable()
    try:
        per_sample_grads(loss, model, torch.randn(4, 30), ps.ClippedMean(1.0))
        assert seen[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_recurrent_layers_hold_their_own_weights_afterwards(engine):
    gru = nn.GRU(3, 4)
    per_sample_grads(lambda m, x: m(x)[0].sum(), gru, torch.randn(2, 5, 3), ps.Norm(), engine=engine)
    assert all(any(x is p for p in gru.parameters()) for x in gru._flat_weights)


def test_each_sample_with_its_own_bias():
    def loss(bias, weight):
        return torch.tanh(F.linear(torch.ones(3, 30, dtype=D), weight, bias)).square().sum()

    check(loss, draw(5, 40), (draw(40, 30),), in_dims=(0, None))
