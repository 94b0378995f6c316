"""Losses that raise: how often they are called, and whose error appears."""

from __future__ import annotations

import contextlib
import traceback

import pytest
import torch
from oracle import assert_trees_close
from seams import with_rule
from torch import nn

import persample as ps
from persample import clear_cache, per_sample_grads

F64 = torch.float64
ENGINES = ("eager", "traced", "compiled", "loop")
MODELS = {
    "linear layers": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(),  # the layers engine
    "matrices": lambda: {"w": torch.ones(2, 3, dtype=F64)},
}


class OwnError(RuntimeError):
    """An error of the user's."""


def value_error():
    raise ValueError("mine")


def runtime_error():
    if True:
        raise RuntimeError("mine: same dtype, in-place operation")


def own_error():
    raise OwnError("mine")


def missing_key():
    return {}["mine"]


def failed_assertion():
    assert ENGINES == (), "mine"


def error_of_an_error():
    try:
        missing_key()
    except KeyError as error:
        raise ValueError("mine") from error


RAISES = {
    value_error: ValueError,
    runtime_error: RuntimeError,
    own_error: OwnError,
    missing_key: KeyError,
    failed_assertion: AssertionError,
    error_of_an_error: ValueError,
}


def calls_until(error, model, act, engine, reduce=None, x=None):
    """Return how often a loss that fails was called, and the error."""
    count = 0

    def loss(params, x):
        nonlocal count
        count += 1
        value = params(x).sum() if isinstance(params, nn.Module) else (params["w"] @ x).sum()
        act()
        return value

    clear_cache()
    x = torch.randn(5, 3, dtype=F64) if x is None else x
    with pytest.raises(error) as raised:
        per_sample_grads(loss, model, x, reduce, engine=engine)
    return count, raised.value


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("act", RAISES, ids=lambda act: act.__name__)
def test_a_loss_that_raises_is_called_once_and_once_with_a_batch_axis(act, model, engine):
    for reduce in (ps.Norm(), None):
        count, error = calls_until(RAISES[act], MODELS[model](), act, engine, reduce)
        assert type(error) is RAISES[act]
        assert "mine" in str(error)
        last = traceback.extract_tb(error.__traceback__)[-1]
        assert (last.filename, last.name) == (__file__, act.__name__)
        assert count == 2  # with a batch axis, for the hint


def two_shapes():
    return torch.ones(2) @ torch.ones(3)


@pytest.mark.parametrize(("engine", "most"), [("eager", 4), ("compiled", 4), ("loop", 2)])
@pytest.mark.parametrize("model", MODELS)
def test_an_error_of_torchs_takes_few_calls(model, engine, most):
    count, error = calls_until(RuntimeError, MODELS[model](), two_shapes, engine, ps.Norm())
    assert "size" in str(error)
    assert count <= most


def test_what_wraps_a_refusal_of_the_short_way_is_no_error():
    def loss(model, x):
        try:
            assert model[0].weight.requires_grad in {True, False}  # which the layers engine refuses to tell
        except Exception as error:
            raise ValueError("mine") from error
        return model(x).sum()

    model, x = MODELS["linear layers"](), torch.randn(5, 3, dtype=F64)
    norms = [per_sample_grads(loss, model, x, ps.Norm(), engine=engine) for engine in ENGINES]
    assert_trees_close(norms[:2], [norms[2]] * 2, 1e-9)


def test_lengths_that_were_made_up_may_be_refused():
    """A second length has a program for all of them tried, at lengths of ours."""

    def loss(w, x):
        return {3: 1.0, 6: 2.0}[len(x)] * (w * x).sum().sin()

    w = torch.tensor(0.7, dtype=F64)
    for length in (3, 6):
        x = torch.randn(4, length, dtype=F64)
        expected, actual = (per_sample_grads(loss, w, x, ps.Norm(), engine=engine) for engine in ("loop", "compiled"))
        assert_trees_close(actual, expected, 1e-9)
    with pytest.raises(KeyError, match="4"):
        per_sample_grads(loss, w, torch.randn(4, 4, dtype=F64), ps.Norm(), engine="compiled")


@pytest.mark.parametrize(
    ("error", "blamed"), [(AttributeError, False), (ImportError, False), (AssertionError, False), (RuntimeError, True)]
)
def test_the_loss_is_not_blamed_for_errors_of_torchs(monkeypatch, error, blamed):
    """An internal error, here in a function of torch that fails while it is traced: the eager engine answers."""
    clear_cache()

    functorch = torch._C._functorch
    namespace = {"error": error, "fake": torch._subclasses.FakeTensor, "functorch": functorch, "torch": torch}
    code = """
def rule(x, _):
    plain = x
    while functorch.is_functorch_wrapped_tensor(plain):
        plain = functorch.get_unwrapped(plain)
    if isinstance(plain, fake):
        raise error("no attribute")
    return x
"""
    exec(compile(code, torch.__file__.replace("__init__", "broken"), "exec"), namespace)
    with_rule(monkeypatch, torch.roll, namespace["rule"])

    def loss(w, x):
        return torch.roll(w * x, 1).sin().sum()

    w, x = torch.randn(3, dtype=F64), torch.randn(4, 3, dtype=F64)
    for _ in range(2):  # the second time it is remembered
        if blamed:
            with pytest.raises(ps.LossError, match="loss_fn cannot be compiled: RuntimeError"):
                per_sample_grads(loss, w, x, ps.Norm(), engine="compiled")
            continue
        with pytest.warns(ps.FallbackWarning, match=f"persample failed at .*{error.__name__}: no attribute"):
            found = per_sample_grads(loss, w, x, ps.Norm(), engine="compiled")
        assert_trees_close(found, per_sample_grads(loss, w, x, ps.Norm()), 1e-9)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("act", [value_error, runtime_error], ids=lambda act: act.__name__)
def test_errors_of_a_call_made_while_an_error_of_torchs_is_handled_are_the_users(act, engine):
    for model in MODELS.values():
        try:
            two_shapes()
        except RuntimeError:
            count, error = calls_until(RAISES[act], model(), act, engine, ps.Norm())
        assert (type(error), count) == (RAISES[act], 2)


def test_errors_of_torchs_that_a_loss_catches():
    def loss(w, x):
        with contextlib.suppress(RuntimeError):
            two_shapes()
        return (w * x).sin().sum()

    w, x = torch.ones(3, dtype=F64), torch.eye(3, dtype=F64)
    for engine in ("eager", "compiled") if torch.__version__ >= "2.14" else ("eager",):
        assert_trees_close(per_sample_grads(loss, w, x, engine=engine), x * torch.cos(x), 1e-9)
    if torch.__version__ < "2.14":  # later ones follow the error
        with pytest.raises(ps.LossError, match=r"cannot be compiled: .*size.* In two_shapes"):
            per_sample_grads(loss, w, x, engine="compiled")


class CodedError(Exception):
    pass


@pytest.mark.parametrize("error", [CodedError(7, "bad"), KeyError("name")])
def test_what_an_error_keeps_stays(error):
    """With a batch axis the loss would run; only a message that is the whole error gets the hint."""

    def loss(w, x):
        if x.ndim == 1:
            raise error
        return (x @ w).sum()

    before = error.args
    with pytest.raises(type(error)) as raised:
        ps.per_sample_grads(loss, torch.ones(3), torch.ones(2, 3), engine="loop")
    assert raised.value.args == before
