"""Hooks on parameters, which are refused; hooks on modules, which run; and TorchScript modules, which are refused."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_trees_close
from torch import nn

import persample as ps
from persample import clear_cache, per_sample_grads

F64 = torch.float64
ENGINES = ("eager", "traced", "loop")
X = torch.randn(4, 3, dtype=F64)


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def output(module, x):
    return module(x).sin().sum()


# ---------------------------------------------------------------- parameters

HOOKS = {
    "hook": lambda p: p.register_hook(lambda grad: 0 * grad),
    "after accumulation": lambda p: p.register_post_accumulate_grad_hook(lambda p: None),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_parameters_are_refused_by_name_until_removed(hook, engine):
    model = mlp()
    expected = per_sample_grads(output, model, X, ps.Norm(), engine="loop")
    for _ in range(2):  # the second time the compiled engine would recall the call
        assert_trees_close(per_sample_grads(output, model, X, ps.Norm(), engine=engine), expected, 1e-9)
    handle = HOOKS[hook](model[2].weight)
    for batch in (X, X[:0]):
        with pytest.raises(ps.ArgumentError, match=r"params\['2.weight'\]: expected a tensor without hooks.*remove"):
            per_sample_grads(output, model, batch, ps.Norm(), engine=engine)
    handle.remove()
    assert_trees_close(per_sample_grads(output, model, X, ps.Norm(), engine=engine), expected, 1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_hooks_on_tensors_of_trees_are_refused(engine):
    params = {"net": {"w": torch.randn(3, dtype=F64, requires_grad=True)}}

    def loss(p, x):
        return (p["net"]["w"] @ x).sin()

    for _ in range(2):
        per_sample_grads(loss, params, X, ps.Norm(), engine=engine)
    for hooked in (params["net"]["w"], 2 * params["net"]["w"]):
        hooked.register_hook(torch.neg)
        with pytest.raises(ps.ArgumentError, match=r"params\['net'\]\['w'\]: expected a tensor without hooks"):
            per_sample_grads(loss, {"net": {"w": hooked}}, X, ps.Norm(), engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_hooks_on_what_is_not_differentiated_do_not_matter(engine):
    model, x = mlp(), X.clone().requires_grad_()

    model[0].weight.register_hook(torch.neg)
    model[0].weight.requires_grad_(False)
    x.register_hook(torch.neg)

    norms = [per_sample_grads(output, model, x, ps.Norm(), engine=e) for e in ("loop", engine)]
    assert_trees_close(norms[1], norms[0], 1e-9)


# ---------------------------------------------------------------- modules

FORWARD = {
    "forward": lambda m, f: m.register_forward_hook(lambda _m, _x, y: f(y)),
    "before": lambda m, f: m.register_forward_pre_hook(lambda _m, x: (f(x[0]),)),
}
BACKWARD = {
    "backward": lambda m, f: m.register_full_backward_hook(lambda _m, g, _: (f(g[0]),)),
    "before backward": lambda m, f: m.register_full_backward_pre_hook(lambda _m, g: (f(g[0]),)),
}


def doubled(calls):
    def double(x):
        calls.append(x.shape)
        return 2 * x

    return double


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("hook", FORWARD)
def test_forward_hooks_run(hook, place):
    clear_cache()
    model = mlp()
    plain = per_sample_grads(output, model, X, ps.Norm())
    FORWARD[hook](model[place], doubled([]))
    expected = per_sample_grads(output, model, X, ps.Norm(), engine="loop")
    assert not torch.allclose(plain, expected)
    for engine in ("eager", "traced") if place == 1 else ("eager",):
        assert_trees_close(per_sample_grads(output, model, X, ps.Norm(), engine=engine), expected, 1e-9)


@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("hook", BACKWARD)
def test_full_backward_hooks_run_in_the_loop_alone(hook, place):
    clear_cache()
    model, calls = mlp(), []
    plain = per_sample_grads(output, model, X, ps.Norm())
    BACKWARD[hook](model[place], doubled(calls))
    changed = per_sample_grads(output, model, X, ps.Norm(), engine="loop")
    assert len(calls) == len(X)
    assert not torch.allclose(plain, changed)
    for engine in ("eager", "traced"):
        with pytest.raises(ps.LossError, match=r"full backward hooks of a module.*engine='loop'"):
            per_sample_grads(output, model, X, ps.Norm(), engine=engine)


# ---------------------------------------------------------------- TorchScript

deprecated = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.out = inner, nn.Linear(1, 2).double()

    def forward(self, x):
        return self.out(self.inner(x[None])[0])


SCRIPTED = {
    "scripted": (lambda: torch.jit.script(mlp()), r"params: expected modules .*received '0' \(Linear\), a TorchScript"),
    "traced": (lambda: torch.jit.trace(mlp(), X), r"a TorchScript module\. Pass the nn\.Module"),
    "inside": (lambda: Around(torch.jit.script(mlp())), r"received 'inner.0' \(Linear\), a TorchScript module"),
    "with buffers": (
        lambda: Around(
            torch.jit.script(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).eval().requires_grad_(False))
        ),
        r"received 'inner.0' \(BatchNorm1d\), a TorchScript module",
    ),
}


@deprecated
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SCRIPTED)
def test_script_modules_are_refused(name, engine):
    make, message = SCRIPTED[name]
    module = make()
    before = {name: x.clone() for name, x in module.state_dict().items()}
    with pytest.raises(ps.ArgumentError, match=message):
        per_sample_grads(output, module, X, ps.Norm(), engine=engine)
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())


@deprecated
@pytest.mark.parametrize("engine", ENGINES)
def test_script_that_is_not_learned_may_be_used_or_is_refused(engine):
    clear_cache()
    model = mlp()
    frozen = torch.jit.script(mlp().requires_grad_(False))
    act = torch.jit.script(scripted_activation)
    around = Around(frozen)

    def check(params, loss, plain, *, captured=False):
        if engine == "traced" and not captured:
            with pytest.raises(ps.LossError, match=rf"(?s)cannot be {engine}: .*engine='eager'"):
                per_sample_grads(loss, params, X, ps.Norm(), engine=engine)
        else:
            expected = per_sample_grads(plain, params, X, ps.Norm(), engine="loop")
            assert_trees_close(per_sample_grads(loss, params, X, ps.Norm(), engine=engine), expected, 1e-9)

    plain = lambda m, x: scripted_activation(m(x)).sum() + m(x).sum()
    check(model, lambda m, x: act(m(x)).sum() + m(x).sum(), plain, captured=True)  # Dynamo knows its Python code
    check(model, lambda m, x: m(x).sum() * frozen(x).sum(), lambda m, x: m(x).sum() * frozen(x).sum())
    check(around, output, output)


def scripted_activation(x: torch.Tensor) -> torch.Tensor:
    return 2 * torch.tanh(x) + torch.softmax(x, -1)
