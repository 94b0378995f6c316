"""Linear layers followed by tanh in nn.Sequential are one function on the eager engine, and nobody can tell."""

from __future__ import annotations

import copy

import pytest
import torch
from oracle import assert_trees_close
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from persample import ClippedMean, Norm, Stack, gemm, onednn, per_sample_grads
from persample.rewrites.caught import Caught

WANTED = {"stack": Stack(), "clipped": ClippedMean(0.1), "norm": Norm()}


@pytest.fixture(autouse=True)
def onednn_computes(monkeypatch):
    """Have it compute whatever it can, on any processor."""
    monkeypatch.setattr(onednn, "is_ahead", torch.backends.mkldnn.is_available)
    monkeypatch.setattr(gemm, "_LEAST_TANH", 1)


@pytest.fixture
def pairs(monkeypatch):
    """The sizes of the layers that were computed with their tanh."""
    sizes = []
    then_tanh = Caught.then_tanh

    def counted(self, x, weight, bias=None):
        sizes.append(tuple(weight.shape))
        return then_tanh(self, x, weight, bias)

    monkeypatch.setattr(Caught, "then_tanh", counted)
    return sizes


def mlp(bias=True):
    torch.manual_seed(0)
    layers = nn.Linear(3, 5, bias), nn.Tanh(), nn.Linear(5, 4, bias), nn.Tanh(), nn.Linear(4, 2)
    return nn.Sequential(*layers)


def rows(*shape):
    return torch.randn(*shape, 3, generator=torch.Generator().manual_seed(1))


def square(model, x):
    return model(x).square().sum()


def agree(loss, model, x, rtol=1e-5):
    found = per_sample_grads(loss, model, x, WANTED)
    again = per_sample_grads(loss, model, x, WANTED)
    assert all(torch.equal(found["stack"][name], rows) for name, rows in again["stack"].items())
    dtype = x.dtype
    exact = per_sample_grads(loss, model.double(), x.double(), WANTED, engine="loop")
    model.to(dtype)
    assert_trees_close(found, exact, rtol)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6,), (1,), (6, 7), (6, 2, 3)])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
def test_pairs_are_computed_at_once(pairs, bias, shape, dtype, rtol):
    agree(square, mlp(bias).to(dtype), rows(*shape).to(dtype), rtol)
    assert pairs == [(5, 3), (4, 5)] * 2


def test_what_is_not_contiguous_or_frozen(pairs):
    model = mlp()
    model[0].requires_grad_(requires_grad=False)
    model[2].weight.requires_grad_(requires_grad=False)
    agree(square, model, torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(0)).permute(2, 1, 0))
    assert len(pairs) == 4


def test_large_and_unusual_numbers():
    model, x = mlp(), rows(4)
    x[0] *= 1e4
    x[1, 0], x[2, 1] = torch.inf, torch.nan
    found, exact = (per_sample_grads(square, model, x, engine=engine) for engine in ("eager", "loop"))
    for name, grads in found.items():
        torch.testing.assert_close(grads, exact[name], equal_nan=True, rtol=1e-4, atol=1e-5)


class Own(nn.Sequential):
    """A sequence that keeps what lies between."""

    def forward(self, x):
        self.between = []
        for part in self:
            x = part(x)
            self.between.append(x)
        return x + self.between[0].sum()


def hooked(model):
    model[1].register_forward_hook(lambda module, args, out: 2 * out)
    return model


def hooked_before(model):
    model[0].register_forward_pre_hook(lambda module, args: (3 * args[0],))
    return model


def replaced(model):
    model[0].forward = lambda x: nn.functional.linear(2 * x, model[0].weight, model[0].bias)
    return model


def of_another_kind(model):
    class Other(nn.Tanh):
        def forward(self, x):
            return torch.sin(x)

    model[1] = Other()
    return model


def kept(model):
    return Own(*model)


def normalized(model):
    weight_norm(model[0])
    return model


@pytest.mark.parametrize(
    "change", [hooked, hooked_before, replaced, of_another_kind, kept, normalized], ids=lambda f: f.__name__
)
def test_what_could_be_seen_between_is_left_alone(pairs, change):
    model = change(mlp())
    agree(square, model, rows(6))
    assert (5, 3) not in pairs


def test_hooks_for_all_modules(pairs):
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: 2 * out if isinstance(module, nn.Tanh) else None
    )
    try:
        agree(square, mlp(), rows(6))
    finally:
        handle.remove()
    assert not pairs


class Tripled(TorchFunctionMode):
    """What tanh gives, three times."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return 3 * out if func in {torch.tanh, torch.Tensor.tanh} else out


def mode_inside(model, x):
    with Tripled():
        return square(model, x)


def hook_inside(model, x):
    seen = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: seen.append(out) if isinstance(module, nn.Tanh) else None
    )
    try:
        return square(model, x) + sum(out.square().sum() for out in seen)
    finally:
        handle.remove()


def copied(model, x):
    other = copy.copy(model)
    other._modules = dict(other._modules)
    other[1] = nn.ReLU()
    return (model(x) - other(x)).square().sum()


@pytest.mark.parametrize("loss", [mode_inside, hook_inside, copied], ids=lambda f: f.__name__)
def test_what_is_changed_inside_the_loss(loss):
    agree(loss, mlp(), rows(6))


PATCHES = {
    "tanh": (nn.Tanh, "forward", lambda self, x: torch.sin(x)),
    "linear": (nn.Linear, "forward", lambda self, x: 2 * nn.functional.linear(x, self.weight, self.bias)),
    "sequence": (nn.Sequential, "forward", lambda self, x: 2 * self[0](x)),
    "call": (nn.Module, "__call__", lambda self, *args: 2 * self._call_impl(*args)),
    "function": (torch, "tanh", lambda x, tanh=torch.tanh: 2 * tanh(x)),
    "linear function": (nn.functional, "linear", lambda x, w, b=None, linear=nn.functional.linear: 2 * linear(x, w, b)),
}


@pytest.mark.parametrize("patched", PATCHES)
def test_what_is_replaced(monkeypatch, pairs, patched):
    monkeypatch.setattr(*PATCHES[patched])
    agree(square, mlp(), rows(6))
    assert not pairs


def test_what_a_loss_keeps_is_as_good_as_plain():
    kept, model, x = [], mlp(), rows(6)

    def loss(model, x):
        kept.append(copy.copy(model))
        return square(model, x)

    per_sample_grads(loss, model, x, Norm())
    assert torch.equal(kept[0](x), model(x))
    assert repr(kept[0]) == repr(model)


def test_a_forward_that_the_loss_sets_stays():
    model = mlp()

    def loss(model, x):
        model.forward = lambda x: 2 * nn.Sequential.forward(model, x)
        return square(model, x)

    agree(loss, model, rows(6))
    assert "forward" in model.__dict__


def test_a_call_inside_the_loss():
    model = mlp()

    frozen = copy.deepcopy(model).double()

    def loss(model, x):
        return square(model, x) * per_sample_grads(square, frozen, x[None].detach().double(), Norm()).sum().to(x)

    agree(loss, model, rows(6))


def one_by_one(model, x):
    return model[1](model[0](x)).sum() + model[0](x).square().sum()


def nested(model, x):
    return nn.Sequential(nn.Tanh(), model, model[1])(x).square().sum()


def inner_gradient(model, x):
    return torch.func.grad(lambda x: model(x).sum())(x).square().sum() + model(x).sum()


def inner_vmap(model, x):
    return torch.vmap(model)(torch.stack([x, 2 * x])).square().sum()


def written(model, x):
    return model[:2](x).mul(2).relu_().sum() + model(x).sum()


@pytest.mark.parametrize("loss", [one_by_one, nested, inner_gradient, inner_vmap, written], ids=lambda f: f.__name__)
def test_other_ways_to_call(loss):
    agree(loss, mlp(), rows(6))


def test_modules_are_left_as_they_were():
    model = mlp()
    before = dict(model.__dict__)
    kind = type(model)
    per_sample_grads(square, model, rows(6))
    assert model.__dict__ == before
    assert type(model) is kind
    with pytest.raises(ZeroDivisionError):
        per_sample_grads(lambda model, x: model(x).sum() / 0 if model(x) is None else 1 / 0, model, rows(6))
    assert model.__dict__ == before


def test_modes_of_the_callers_see_the_operations_of_torch(pairs):
    seen = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seeing():
        per_sample_grads(square, mlp(), rows(6))
    assert torch.ops.aten.tanh.default in seen
    pairs.clear()
    with torch.device("cpu"):  # a mode that looks at functions
        per_sample_grads(square, mlp(), rows(6))
    assert not pairs
