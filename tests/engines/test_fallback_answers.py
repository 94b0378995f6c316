"""Where an optimization raises an error, the call is answered without it, and one warning says what failed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compiler import failing_after_the_run, without_compiling
from oracle import assert_trees_close
from seams import without_layers
from torch import nn
from torch.nn import functional as F

import persample as ps
from persample import FallbackWarning, clear_cache, per_sample_grads, vmap_rules
from persample.engines.compiled import programs
from persample.engines.layers import interceptor
from persample.factors import Conv, Outer

F64 = torch.float64


def failing(definition):
    """Return a function that raises an error of the library's own."""
    code = f"def {definition}:\n    raise ValueError('zip() argument 2 is shorter than argument 1')"
    namespace = {}
    exec(compile(code, str(Path(ps.__file__).with_name("broken.py")), "exec"), namespace)
    return namespace.popitem()[1]


broken = failing("broken(*args, **kwargs)")


def seeded(make):
    torch.manual_seed(0)
    return make().double()


def convolutions():
    return seeded(lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding="valid"), nn.Flatten(0), nn.Linear(48, 2)))


def squares(model, x):
    return model(x).square().sum()


def pixels():
    return torch.randn(5, 2, 6, 6, dtype=F64, generator=torch.Generator().manual_seed(1))


REDUCTIONS = {"mean": ps.Mean(), "norm": ps.Norm(), "gram": ps.Gram(), "variance": ps.Variance(), "stack": ps.Stack()}


@pytest.mark.parametrize("padding", ["valid", "same"])
def test_convolutions_whose_padding_is_a_word(padding):
    model = seeded(lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=padding, dilation=2), nn.Tanh()))
    found, expected = (per_sample_grads(squares, model, (pixels(),), REDUCTIONS, engine=e) for e in ("eager", "loop"))
    assert_trees_close(found, expected, 1e-9)


BREAKS = {  # what is broken, for which reduction, and what the warning names
    "a method of a factor": (
        lambda m: m.setattr(Conv, "weighted_sum", failing("weighted_sum(self, weights, dtype)")),
        ps.Mean(),
        r"Conv\.weighted_sum of params\['0\.weight'\]",
    ),
    "a step after all chunks": (
        lambda m: m.setattr(Outer, "gram", failing("gram(self, other=None, dtype=None)")),
        ps.Gram(),
        r"Outer\.gram of params\['2\.weight'\]",
    ),
    "a rule": (
        lambda m: (without_layers(m), m.setitem(vmap_rules._RULES, F.linear, broken)),
        REDUCTIONS,
        r"torch\.nn\.functional\.linear of params\['2\.weight'\]",
    ),
}


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"weights": [1, 0, 2, 1, 1]}], ids=str)
@pytest.mark.parametrize("broke", BREAKS)
def test_the_answer_is_right(broke, options, monkeypatch):
    breaks, reduce, named = BREAKS[broke]
    model = convolutions()
    expected = per_sample_grads(squares, model, (pixels(),), reduce, engine="loop", **options)
    with monkeypatch.context() as patched:
        breaks(patched)
        with pytest.warns(FallbackWarning, match=rf"failed at {named}.*ValueError: zip\(\).*please report") as caught:
            found = per_sample_grads(squares, model, (pixels(),), reduce, **options)
    assert_trees_close(found, expected, 1e-9)
    (warning,) = caught
    assert warning.filename == __file__
    per_sample_grads(squares, model, (pixels(),), reduce)  # no warning: nothing is remembered


def test_layers_of_our_own(monkeypatch):
    model, x = seeded(lambda: nn.Linear(3, 2)), torch.randn(4, 3, dtype=F64)
    expected = per_sample_grads(squares, model, (x,), ps.Norm(), engine="loop")
    monkeypatch.setitem(interceptor._LAYERS, F.linear, broken)
    with pytest.warns(FallbackWarning, match="failed at"):
        assert_trees_close(per_sample_grads(squares, model, (x,), ps.Norm()), expected, 1e-9)


def test_the_compiler(monkeypatch):
    model, x = seeded(lambda: nn.Linear(3, 2)), torch.randn(4, 3, dtype=F64)
    expected = per_sample_grads(squares, model, (x,), ps.Norm(), engine="loop")
    monkeypatch.setattr(programs, "for_one_size", broken)
    with pytest.warns(FallbackWarning, match=r"(?s)ValueError: zip\(\)"):
        assert_trees_close(per_sample_grads(squares, model, (x,), ps.Norm(), engine="compiled"), expected, 1e-9)


def test_a_fault_of_the_compiler_is_met_once(monkeypatch):
    clear_cache()
    calls = []

    def faulty(task):
        calls.append(task)
        return broken()

    monkeypatch.setattr(programs, "for_one_size", faulty)
    model, x = seeded(lambda: nn.Linear(3, 2)), torch.randn(4, 3, dtype=F64)
    expected = per_sample_grads(squares, model, (x,), ps.Norm(), engine="loop")
    for _ in range(3):
        with pytest.warns(FallbackWarning, match=r"(?s)ValueError: zip\(\)"):
            assert_trees_close(per_sample_grads(squares, model, (x,), ps.Norm(), engine="compiled"), expected, 1e-9)
    assert len(calls) == 1
    monkeypatch.undo()
    without_compiling(monkeypatch)
    found = per_sample_grads(squares, model, (x[:3],), ps.Norm(), engine="compiled")  # other inputs, another program
    assert_trees_close(found, expected[:3], 1e-9)


def test_a_program_that_fails_after_it_has_written_into_the_total_of_a_stream(monkeypatch):
    clear_cache()
    failing_after_the_run(monkeypatch, "not enough memory")
    w, x, wanted = torch.randn(3, dtype=F64), torch.randn(6, 3, dtype=F64), {"sum": ps.Sum(), "variance": ps.Variance()}
    loss = lambda w, x: (w @ x).sin() + w.square().sum()
    with pytest.warns(FallbackWarning, match="not enough memory"):
        found = ps.accumulate(loss, w, x.split(2), wanted, engine="compiled")
    assert_trees_close(found, per_sample_grads(loss, w, x, wanted), 1e-9)


def noisy(w, x):
    noise = torch.rand_like(x)
    return F.linear(w * noise, x[None]).sum(), noise


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_random_numbers_are_drawn_once(randomness, monkeypatch):
    w, x = torch.ones(3, dtype=F64), torch.randn(4, 3, dtype=F64)
    monkeypatch.setattr(Outer, "squared_norms", broken)
    monkeypatch.setattr("persample.factors.factor.Dense.gram", broken)

    def call(reduce):
        torch.manual_seed(3)
        return per_sample_grads(noisy, w, x, reduce, randomness=randomness), torch.rand(2)

    assert_trees_close(call(ps.Stack()), call(None), 0)


def test_an_error_that_every_way_raises_is_the_users(monkeypatch):
    """The rule fails in its own way; plain autograd says what is wrong with the loss."""
    monkeypatch.setitem(vmap_rules._RULES, F.linear, broken)
    model, x = seeded(lambda: nn.Linear(3, 2)), torch.randn(4, 5, dtype=F64)
    with pytest.raises(RuntimeError, match=r"size|shape") as caught:
        per_sample_grads(squares, model, (x,), ps.Norm())
    assert caught.value.__suppress_context__


def test_a_row_of_another_sample_is_never_the_answer():
    """vmap without our rules reads a row of the next sample here; the loop refuses."""

    def loss(w, i):
        return torch.index_select(w * i[:, None], 0, i + 1).sum()

    rows, w = torch.tensor([[0, 1, 1], [2, 1, 0]]), torch.randn(3, 3, dtype=F64)
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        per_sample_grads(loss, w, rows)


def test_an_error_of_a_later_sample_is_the_users():
    def loss(w, i):
        return F.embedding(i, w).sum()

    with pytest.raises(IndexError, match="out of range"):
        per_sample_grads(loss, torch.randn(4, 3, dtype=F64), torch.tensor([[0], [1], [9]]), ps.Norm())


def test_a_rule_that_fails_where_vmap_needs_it(monkeypatch):
    """Nothing tells whether the rule or the loss is at fault: its own error is raised."""
    without_layers(monkeypatch)
    for table in (vmap_rules._RULES, vmap_rules._FIRST_DERIVATIVE_RULES):
        monkeypatch.setitem(table, torch._VF.gru, broken)
    model, x = seeded(lambda: nn.GRU(2, 3)), torch.randn(4, 5, 2, dtype=F64)
    with pytest.raises(ValueError, match="zip"):
        per_sample_grads(lambda m, x: m(x)[0].sum(), model, (x,), ps.Norm())
    with pytest.warns(FallbackWarning, match="engine='auto'"):
        per_sample_grads(lambda m, x: m(x)[0].sum(), model, (x,), ps.Norm(), engine="auto")


def test_under_a_transform_of_the_callers(monkeypatch):
    w, x = torch.randn(2, 3, dtype=F64), torch.randn(4, 3, dtype=F64)
    monkeypatch.setattr(ps.reductions.Norm, "lift", broken)  # of every engine
    with pytest.raises(ValueError, match="zip"):
        torch.func.vmap(lambda w: per_sample_grads(lambda w, x: w @ x, w, x, ps.Norm()))(w)


def test_composite_losses(monkeypatch):
    model = seeded(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout(), nn.Flatten(0), nn.Linear(48, 2)))

    def grads(engine):
        torch.manual_seed(2)
        found = ps.composite_grads(encode, couple, model, (pixels(),), chunk_size=2, engine=engine)
        return found, torch.rand(2)

    expected = grads("eager")
    monkeypatch.setattr(Conv, "weighted_sum", failing("weighted_sum(self, weights, dtype)"))
    with pytest.warns(FallbackWarning, match="failed at"):
        assert_trees_close(grads("eager"), expected, 1e-9)


def encode(model, x):
    return model(x)


def couple(z):
    return torch.logsumexp(z @ z.T, 0).sum()
