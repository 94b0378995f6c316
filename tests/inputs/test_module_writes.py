"""Losses that write into what modules hold: refused on every engine, and the modules stay as they were."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import nn

from persample import LossError, Norm, composite_grads, per_sample_grads

X = torch.linspace(1, 2, 12).reshape(4, 3)
TWO = torch.full((3,), 2.0)
WROTE = "wrote in place into|writes in place|sets requires_grad"


class Model(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.w, self.u = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mean", torch.ones(3))
        self.plain, self.listed, self.nested = torch.ones(3), [torch.ones(3)], {"a": (torch.ones(3),)}
        self.change = [change]

    def forward(self, x):
        self.change[0](self, x)
        return (self.w * self.u * x * self.mean * self.plain * self.listed[0]).sum()

    def tensors(self):
        named = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return {**named, "plain": self.plain, "listed": self.listed[0], "nested": self.nested["a"][0]}


def set_data(x, value):
    x.data = value


def set_grad(x, value):
    x.grad = value


def under_no_grad(change):
    def changed(m, x):
        with torch.no_grad():
            change(m, x)

    return changed


def caught(m, x):
    with suppress(LossError):
        m.u.data = m.u.data * 2


def power_iteration(m, x):
    """Spectral norm of older code."""
    v = m.w.data * m.u.data
    m.u.data = v / v.norm()


REFUSED = {
    "data of a frozen parameter": lambda m, x: set_data(m.u, m.u.data * 2),
    "data of one per sample": lambda m, x: set_data(m.u, m.u.data * x),
    "data of a parameter": lambda m, x: set_data(m.w, m.w.data * 2),
    "data of a buffer": lambda m, x: set_data(m.mean, m.mean.data * 2),
    "data of an attribute": lambda m, x: set_data(m.plain, m.plain * 2),
    "data in a list": lambda m, x: set_data(m.listed[0], m.plain * 2),
    "data in nested containers": lambda m, x: set_data(m.nested["a"][0], m.plain * 2),
    "copy_ into data": lambda m, x: m.u.data.copy_(TWO),
    "mul_ of data": lambda m, x: m.u.data.mul_(2),
    "mul_ of data of a parameter": lambda m, x: m.w.data.mul_(2),
    "mul_ of data of an attribute": lambda m, x: m.plain.data.mul_(2),
    "mul_ of a view": lambda m, x: m.u.detach().view(-1)[:2].mul_(2),
    "copy_": under_no_grad(lambda m, x: m.u.copy_(TWO)),
    "copy_ of one per sample": under_no_grad(lambda m, x: m.u.copy_(x)),
    "copy_ into a parameter": under_no_grad(lambda m, x: m.w.copy_(TWO)),
    "set_": under_no_grad(lambda m, x: m.u.set_(TWO.clone())),
    "set_ of a parameter": under_no_grad(lambda m, x: m.w.set_(TWO.clone())),
    "resize_": lambda m, x: m.u.resize_(5),
    "out": lambda m, x: torch.mul(m.u, 2, out=m.u),
    "several at once": under_no_grad(lambda m, x: torch._foreach_mul_([m.u], 2)),
    "item": lambda m, x: m.u.__setitem__(0, 2.0),
    "init": lambda m, x: nn.init.constant_(m.u, 2.0),
    "requires_grad_": lambda m, x: m.u.requires_grad_(),
    "requires_grad": lambda m, x: setattr(m.u, "requires_grad", True),
    "grad": lambda m, x: set_grad(m.u, TWO.clone()),
    "load_state_dict": lambda m, x: m.load_state_dict({name: 2 * p.detach() for name, p in m.state_dict().items()}),
    "another dtype": lambda m, x: m.half(),
    "power iteration": power_iteration,
    "a refusal that is caught": caught,
}
ACCEPTED = {
    "another parameter": (lambda m, x: setattr(m, "u", nn.Parameter(m.u * 2, requires_grad=False)), 2),
    "another parameter in its slot": (
        lambda m, x: m._parameters.update(u=nn.Parameter(m.u * 2, requires_grad=False)),
        2,
    ),
    "deleted": (lambda m, x: (u := m.u, delattr(m, "u"), setattr(m, "u", u * 2)), 2),
    "register_buffer": (lambda m, x: (m.register_buffer("mean", m.mean * 2), m.register_buffer("more", TWO)), 2),
    "mul_ of a buffer": (lambda m, x: m.mean.mul_(2), 2),
    "mul_ of data of a buffer": (lambda m, x: m.mean.data.mul_(2), 2),
    "grad of a parameter": (lambda m, x: set_grad(m.w, None), 1),
    "no gradients": (lambda m, x: m.zero_grad(), 1),
}


def grads(model, way):
    if way == "encoder":
        return composite_grads(lambda m, x: m(x)[None], lambda z: z.square().sum(), model, X)
    if way == "batched encoder":
        options = {"batched": True, "chunk_size": 2}
        return composite_grads(lambda m, x: torch.stack([*map(m, x)]), lambda z: z.square().sum(), model, X, **options)
    return per_sample_grads(lambda m, x: m(x), model, X, engine=way)


@contextmanager
def untouched(model):
    def facts(x):
        return id(x), type(x), x.requires_grad, x.grad, x.data_ptr(), x.shape, x.dtype, x.tolist()

    before, slots = model.tensors(), [list(model._parameters), list(model._buffers)]
    expected = {name: facts(x) for name, x in before.items()}
    yield
    assert {name: facts(x) for name, x in model.tensors().items()} == expected
    assert [list(model._parameters), list(model._buffers)] == slots


@pytest.mark.parametrize("way", ["eager", "loop", "auto", "encoder", "batched encoder"])
@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_a_write_is_refused_and_the_module_untouched(change, way):
    model = Model(change)
    with untouched(model), pytest.raises(LossError, match=WROTE):
        grads(model, way)


@pytest.mark.parametrize("way", ["eager", "loop"])
@pytest.mark.parametrize(("change", "factor"), ACCEPTED.values(), ids=ACCEPTED)
def test_a_change_that_is_undone_is_accepted(change, factor, way):
    model = Model(change)
    with untouched(model):
        found = grads(model, way)
    torch.testing.assert_close(found["w"], factor * X)


def test_a_part_may_be_frozen_once_more():
    model = Model(lambda m, x: m.u.requires_grad_(False))
    with untouched(model):
        torch.testing.assert_close(grads(model, "loop")["w"], X)


COMPILED = ("data of a frozen parameter", "data of a buffer", "copy_ into a parameter", "out", "grad", "requires_grad")


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_refuses_writes(name):
    model = Model(REFUSED[name])
    with untouched(model), pytest.raises(LossError, match=WROTE):
        grads(model, "compiled")


def test_compiled_code_does_not_set_grad():
    model = Model(lambda m, x: set_grad(m.w, TWO))
    with untouched(model), pytest.raises(LossError, match="changes requires_grad or grad of"):
        grads(model, "compiled")


@pytest.mark.parametrize("engine", ["eager", "loop", "auto"])
@pytest.mark.parametrize("change", [lambda w: set_data(w, 2 * w.data), lambda w: w.data.mul_(2)], ids=["data", "mul_"])
def test_a_plain_dict_of_parameters(change, engine):
    params = {"w": torch.ones(3), "v": torch.ones(3, 3)}

    def loss(p, x):
        change(p["w"])
        return (p["v"] @ (p["w"] * x)).sum()

    with pytest.raises(LossError, match=r"wrote in place into (params\['w'\]|a tensor)"):
        per_sample_grads(loss, params, X, engine=engine)
    assert params["w"].tolist() == [1.0] * 3


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_old_spectral_norm_in_train_mode(engine):
    layer = torch.nn.utils.spectral_norm(nn.Linear(3, 3))
    buffers = {name: x.clone() for name, x in layer.named_buffers()}
    found = per_sample_grads(lambda m, x: m(x).square().sum(), layer, X, engine=engine)
    assert found["weight_orig"].abs().min() > 0
    torch.testing.assert_close(dict(layer.named_buffers()), buffers)


def test_the_loss_of_composite_gradients():
    model = Model(lambda m, x: set_data(m.u, TWO))
    with untouched(model), pytest.raises(LossError, match="loss_fn wrote in place into"):
        composite_grads(lambda w, x: w * x, lambda m, z: sum(map(m, z)), torch.ones(3), X, loss_params=model)


@pytest.mark.parametrize("engine", ["loop", "auto"])
def test_data_of_what_the_loss_computed_itself(engine):
    def loss(w, x):
        y = w * x
        y.data = y.data * 2
        return (y * w).sum()

    with pytest.warns(match="engine='auto'") if engine == "auto" else pytest.MonkeyPatch.context():
        found = per_sample_grads(loss, torch.ones(3), X, engine=engine)
    torch.testing.assert_close(found, 3 * X)  # y = 2 x, and dy/dw = x


def test_a_process_that_sets_data_lives():
    code = (
        "import torch, persample\n"
        "m = torch.nn.Linear(3, 1)\n"
        "m.u = torch.nn.Parameter(torch.ones(3), requires_grad=False)\n"
        "def loss(m, x):\n"
        "    m.u.data = m.u.data * x\n"
        "    return m(m.u * x).sum()\n"
        "try:\n"
        "    persample.per_sample_grads(loss, m, torch.ones(4, 3))\n"
        "except persample.LossError:\n"
        "    print(type(m.u.data), m.u.tolist())\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "<class 'torch.Tensor'> [1.0, 1.0, 1.0]\n"), found.stderr


@pytest.mark.parametrize("engine", ["loop", "auto"])
@pytest.mark.filterwarnings("ignore::persample.FallbackWarning")
def test_a_module_that_is_where_it_is_moved_to_is_left_alone(engine):
    class Moved(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            self.to(x.device)
            return self.layer(x)

    module, x = Moved(), torch.randn(5, 4)
    norms = per_sample_grads(lambda m, x: m(x).sum(), module, x, Norm(), engine=engine)
    torch.testing.assert_close(norms, (3 * x.square().sum(1) + 3).sqrt())


CHANGES = {
    "requires_grad": lambda m: setattr(m[0].weight, "requires_grad", False),
    "requires_grad of the last": lambda m: setattr(m[1].bias, "requires_grad", False),
    "requires_grad_": lambda m: m[0].weight.requires_grad_(False),
    "module": lambda m: m[0].requires_grad_(False),
    "retain_grad": lambda m: m[0].weight.retain_grad(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_gradients_that_a_loss_switches_off_or_keeps(change):
    """Where vmap cannot do so, an error of ours; the loop sees the stand-ins change."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), torch.randn(4, 3)

    def loss(m, x):
        change(m)
        return m(x).sum()

    with pytest.raises(LossError, match=r"sets requires_grad, or calls retain_grad\(\)"):
        per_sample_grads(loss, model, x)
    per_sample_grads(loss, model, x, engine="loop")
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


class Lazily(nn.Module):
    """Makes a buffer of an attribute at its first call, as torchrl's ``SACLoss`` does."""

    def __init__(self):
        super().__init__()
        self.w, self._scale = nn.Parameter(torch.ones(3)), "auto"

    def forward(self, x):
        if "_scale" not in self._buffers:
            value = 2.0 if self._scale == "auto" else 0.0
            del self._scale
            self.register_buffer("_scale", torch.tensor(value))
        return self._scale * (self.w * x).sum()


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_an_attribute_that_became_a_buffer_is_an_attribute_again(engine):
    module, x = Lazily(), torch.eye(3)
    for _ in range(2):
        assert torch.equal(per_sample_grads(lambda m, x: m(x), module, x, engine=engine)["w"], 2 * x)
    assert module._scale == "auto"
    assert not module._buffers
