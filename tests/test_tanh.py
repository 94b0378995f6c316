"""tanh by oneDNN on the eager engine: as good as torch's, used where it should be, and never seen by anybody."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_trees_close
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from persample import Aux, ClippedMean, Stack, per_sample_grads
from persample.cpu import onednn, tanh

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
X = torch.cat([torch.linspace(0, 12, 1_000_001), torch.logspace(-38, 1, 200_001)])
EXACT = torch.tanh(X.double())


@pytest.fixture(autouse=True)
def used(monkeypatch):
    """Have it compute whatever it can, on any processor; return the sizes of what it was given."""
    monkeypatch.setattr(onednn, "is_ahead", lambda: True)
    monkeypatch.setattr(tanh, "_LEAST", 1)
    sizes, to_mkldnn = [], torch.Tensor.to_mkldnn

    def watched(x):
        sizes.append(x.numel())
        return to_mkldnn(x)

    monkeypatch.setattr(torch.Tensor, "to_mkldnn", watched)
    return sizes


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def squared(model, x, y):
    return (model(x) - y).square().sum()


def called(model):
    return lambda p, x, y: squared(lambda x: functional_call(model, p, x), x, y)


def rows(size=4):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 3, generator=generator), torch.randn(size, 1, generator=generator)


def in_double(loss, params, batch, reduce):
    wide = {name: x.detach().double() for name, x in params.items()}
    return per_sample_grads(loss, wide, tuple(x.double() for x in batch), reduce, engine="loop")


def test_it_is_right_to_little_more_than_a_unit_in_the_last_place(used):
    unit = torch.nextafter(EXACT.float(), torch.tensor(2.0)).double() - EXACT.float().double()
    error = ((tanh.tanh(X) - EXACT).abs() / unit).max().item()
    assert 0.5 < error < 1.3
    assert torch.equal(tanh.tanh(-X), -tanh.tanh(X))
    assert len(used) == 3


def test_it_ends_at_one_and_keeps_what_is_no_number():
    x = torch.tensor([0.0, -0.0, 1e-40, 9.1, 100.0, -100.0, torch.inf, -torch.inf, torch.nan])
    torch.testing.assert_close(tanh.tanh(x), torch.tanh(x), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(tanh.tanh(x).signbit(), x.signbit())
    assert not (1 - tanh.tanh(X[X > 9.1]).square()).any()


@pytest.mark.parametrize(
    "x",
    [torch.ones(2).double(), torch.ones(2).bfloat16(), torch.ones(1).expand(2), nn.Parameter(torch.ones(2), False)],
    ids=["double", "half", "repeated", "subclass"],
)
def test_others_are_left_to_torch(used, x):
    assert torch.equal(tanh.tanh(x), torch.tanh(x))
    assert not used


@pytest.mark.parametrize("shape", [(4, 3, 2), (1, 1), (2, 1, 3, 1, 2, 1, 2)])
def test_any_order_of_axes(used, shape):
    x = torch.linspace(-2, 2, torch.Size(shape).numel()).view(shape)
    for order in (range(len(shape)), [*range(1, len(shape)), 0], list(range(len(shape)))[::-1]):
        y = x.permute(*order)
        torch.testing.assert_close(tanh.tanh(y), torch.tanh(y))
        assert tanh.tanh(y).stride() == torch.tanh(y).stride()
    assert len(used) == 6


def test_small_ones_other_processors_and_forbidden_ones_are_left_to_torch(used, monkeypatch):
    x = torch.ones(8)
    for question in ("is_allowed", "is_ahead"):
        with monkeypatch.context() as patch:
            patch.setattr(onednn, question, lambda: False)
            tanh.tanh(x)
    monkeypatch.setattr(tanh, "_LEAST", 9)
    tanh.tanh(x)
    assert not used


@pytest.mark.parametrize("reduce", [Stack(), ClippedMean(0.1)], ids=["stack", "clipped mean"])
@pytest.mark.parametrize("spelling", [torch.tanh, torch.Tensor.tanh, nn.functional.tanh])
def test_losses_of_tensors_use_it(used, model, spelling, reduce):
    def loss(p, x, y):
        return (spelling(p["0.weight"] @ x + p["0.bias"]) @ p["2.weight"].T + p["2.bias"] - y).square().sum()

    params = {name: x.detach() for name, x in model.named_parameters()}
    found = per_sample_grads(loss, params, rows(), reduce)
    assert used == [20]
    assert_trees_close(found, in_double(loss, params, rows(), reduce), 1e-5)


@pytest.mark.parametrize("size", [1, 4])
def test_losses_of_modules_use_it(used, model, size):
    def apart(model, x, y):
        return (model[2](torch.tanh(model[0](x))) - y).square().sum()

    found = per_sample_grads(apart, model, rows(size), ClippedMean(0.1))
    assert used == [5 * size]
    exact = in_double(called(model), dict(model.named_parameters()), rows(size), ClippedMean(0.1))
    assert_trees_close(found, exact, 1e-5)


def test_derivatives_of_derivatives(used):
    def loss(w, x):
        return torch.func.grad(lambda w: torch.tanh(w * x).sum())(w).square().sum()

    w, x = torch.linspace(-2, 2, 5), torch.linspace(0.5, 2, 15).view(3, 5)
    found = per_sample_grads(loss, w, x)
    assert used
    assert_trees_close(found, per_sample_grads(loss, w.double(), x.double(), engine="loop"), 1e-5)


def test_losses_that_write_into_it(used):
    def loss(w, x):
        return torch.tanh(w * x).sum() + (w * x).tanh_().sum()

    w, x = torch.linspace(-2, 2, 5), torch.linspace(0.5, 2, 15).view(3, 5)
    found = per_sample_grads(loss, w, x)
    assert used == [15]
    assert_trees_close(found, per_sample_grads(loss, w.double(), x.double(), engine="loop"), 1e-5)


def test_what_only_stands_for_a_tensor_is_called_itself():
    class Logged:
        def __init__(self, value):
            self.value = value

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return cls(func(*(x.value for x in args), **(kwargs or {})))

    found = per_sample_grads(lambda w, x: torch.tanh(Logged(w * x)).value.sum(), torch.ones(3), torch.ones(2, 3))
    torch.testing.assert_close(found, torch.full((2, 3), 1 - torch.tanh(torch.tensor(1.0)).item() ** 2))


def test_what_it_returns_is_a_tensor_like_any_other(used):
    def loss(w, x):
        y = torch.tanh(w * x)
        return y.sum(), y

    _, aux = per_sample_grads(loss, torch.ones(3), torch.ones(2, 3), {"rows": Stack(), "aux": Aux()}).values()
    assert used
    assert type(aux) is torch.Tensor
    assert aux.layout is torch.strided
    assert aux.untyped_storage().nbytes() == 24


def test_under_a_vmap_of_the_callers(used, model):
    params, batch = {name: x.detach() for name, x in model.named_parameters()}, rows()

    def of(scale):
        scaled = {name: scale * x for name, x in params.items()}
        return per_sample_grads(called(model), scaled, batch)

    scales = torch.tensor([1.0, 2.0])
    found = torch.vmap(of)(scales)
    assert used
    for i, scale in enumerate(scales):
        assert_trees_close({name: x[i] for name, x in found.items()}, of(scale), 1e-5)


def test_modes_of_the_callers_see_the_operations_of_torch(used, model):
    seen = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seeing(), FlopCounterMode(display=False):
        per_sample_grads(squared, model, rows())
    assert torch.ops.aten.tanh.default in seen
    assert not used
