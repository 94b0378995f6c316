"""Compiled code at its first run, compared with the graph that it was compiled from: wrong code never answers."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from compiler import without_corrections, wrong_code
from oracle import assert_trees_close
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import persample as ps
from persample import CompilerWarning, per_sample_grads
from persample.engines.compiled import checking, clear_cache

DIFFER = r"engine='compiled' found that the code of torch's compiler and torch's own kernels differ in {}, on the first"
ATEN = torch.ops.aten
W = torch.linspace(-1, 1, 6)


@pytest.fixture(autouse=True)
def _fresh():
    clear_cache()


@pytest.fixture
def wrong(monkeypatch):
    """Make Inductor's code of one operation wrong, by a factor, as a wrong lowering would; compile nothing."""
    return functools.partial(wrong_code, monkeypatch)


def loss(w, x):
    return torch.sin(w * x).exp().sum()


@pytest.mark.parametrize("operation", [ATEN.exp.default, ATEN.mul.Tensor])
def test_wrong_code_is_found_at_the_first_call(operation, wrong):
    wrong(operation)
    batch, wanted = torch.randn(4, 6), (ps.ClippedMean(0.5), ps.Norm())
    expected = per_sample_grads(loss, W, batch, wanted, engine="loop")
    with pytest.warns(CompilerWarning, match=DIFFER.format(str(operation))) as caught:
        assert_trees_close(per_sample_grads(loss, W, batch, wanted, engine="compiled"), expected, 1e-6)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_trees_close(per_sample_grads(loss, W, batch, wanted, engine="compiled"), expected, 1e-6)


def test_wrong_code_for_any_batch_size(wrong):
    wrong(None)  # right for one size
    per_sample_grads(loss, W, torch.randn(4, 6), ps.Norm(), engine="compiled")
    wrong(ATEN.exp.default)
    batch = torch.randn(3, 6)
    with pytest.warns(CompilerWarning, match=DIFFER.format("aten.exp.default")):
        found = per_sample_grads(loss, W, batch, ps.Norm(), engine="compiled")
    assert_trees_close(found, per_sample_grads(loss, W, batch, ps.Norm(), engine="loop"), 1e-6)


def test_wrong_code_that_writes_into_a_previous_result(wrong):
    out = per_sample_grads(loss, W, torch.randn(4, 6))
    wrong(ATEN.exp.default)
    batch = torch.randn(4, 6)
    with pytest.warns(CompilerWarning, match=DIFFER.format("aten.exp.default")):
        assert per_sample_grads(loss, W, batch, engine="compiled", out=out) is out
    assert_trees_close(out, per_sample_grads(loss, W, batch, engine="loop"), 1e-6)


def test_wrong_code_in_a_stream(wrong):
    wrong(ATEN.exp.default)
    batches = list(torch.randn(3, 4, 6))
    wanted = ps.Mean(), ps.Norm()
    with pytest.warns(CompilerWarning, match=DIFFER.format("aten.exp.default")):
        found = ps.accumulate(loss, W, batches, wanted, engine="compiled")
    assert_trees_close(found, ps.accumulate(loss, W, batches, wanted, engine="loop"), 1e-6)


def test_random_numbers_are_left_out(wrong):
    """Compiled code draws them in another order; what does not depend on them is compared."""

    def noisy(w, x):
        return (w * torch.rand_like(x)).sum(), torch.exp(x)

    options = {"randomness": "different", "engine": "compiled"}
    wrong(ATEN.mul.Tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CompilerWarning)
        per_sample_grads(noisy, W, torch.randn(4, 6), (ps.Norm(), ps.Aux()), **options)
    clear_cache()
    wrong(ATEN.exp.default)
    with pytest.warns(CompilerWarning, match=DIFFER.format("aten.exp.default")):
        per_sample_grads(noisy, W, torch.randn(4, 6), (ps.Norm(), ps.Aux()), **options)


def test_the_check_draws_no_random_numbers(wrong):
    def noisy(w, x):
        return (w * torch.rand_like(x)).sum()

    wrong(None)
    drawn = []
    for _ in range(2):  # the first call is checked
        torch.manual_seed(0)
        found = per_sample_grads(noisy, W, torch.ones(4, 6), randomness="different", engine="compiled")
        drawn.append((found, torch.rand(3)))
    assert all(map(torch.equal, *drawn))


def test_a_failing_search_for_the_fault_still_ends_in_the_traced_program():
    def compiled(_):
        raise RuntimeError("the compiler failed")

    graph = make_fx(lambda x: [x * 2])(torch.ones(3))
    code = checking.Checked(graph, lambda tensors: [tensors[0] * 3], compiled, noted=False)
    with pytest.warns(CompilerWarning, match=DIFFER.format("the loss")):
        assert torch.equal(code([torch.ones(3)])[0], 2 * torch.ones(3))
    assert torch.equal(code([torch.ones(3)])[0], 2 * torch.ones(3))


def test_without_memory_for_a_second_run_code_is_not_checked():
    def exhausted(*_):
        raise torch.OutOfMemoryError

    graph = make_fx(lambda x: [x * 2])(torch.ones(3))
    for node in graph.graph.nodes:
        node.target = exhausted if node.op == "call_function" else node.target
    code = checking.Checked(graph, lambda tensors: [tensors[0] * 2], lambda _: exhausted, noted=False)
    for _ in range(2):
        assert torch.equal(code([torch.ones(3)])[0], 2 * torch.ones(3))


def test_a_warning_that_is_raised_leaves_the_traced_program():
    def written(x, total):
        total.add_(x)
        return [x * 2]

    graph = make_fx(written)(torch.ones(3), torch.ones(3))

    def compiled(tensors):
        x, total = tensors
        total.add_(3 * x)
        return [x * 2]

    code, total = checking.Checked(graph, compiled, lambda _: compiled, noted=False), torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CompilerWarning)
        with pytest.raises(CompilerWarning, match=DIFFER.format(".*")):
            code([torch.ones(3), total])
        assert torch.equal(total, 2 * torch.ones(3))
        code([torch.ones(3), total])
    assert torch.equal(total, 3 * torch.ones(3))


DRAW = torch.Generator().manual_seed(0)  # some comparisons differ in fewer than all rounded inputs
X, ROWS = torch.randn(8, 32, generator=DRAW), torch.randn(5, 32, generator=DRAW)
ROUNDED = {
    "zero by cancellation": lambda w, x: (w @ x).sum() - (w.sum(0) * x).sum(),
    "an integer": lambda w, x: ((w @ x).exp() * 1000).long(),
    "a comparison": lambda w, x: (w @ x).softmax(0).sum() == 1,
}


@pytest.mark.parametrize("name", ROUNDED)
def test_rounding_errors_are_no_faults(name, wrong):
    """Code that rounds otherwise, by two units in the last place."""
    wrong(ATEN.mm.default, 1 + 2 * torch.finfo(torch.float32).eps)

    def own(w, x):
        return (w @ x).square().sum(), ROUNDED[name](w, x)

    with warnings.catch_warnings():
        warnings.simplefilter("error", CompilerWarning)
        per_sample_grads(own, ROWS, X, (ps.Norm(), ps.Aux()), engine="compiled")


def test_random_numbers_that_are_drawn_into_what_has_views(wrong):
    def noisy(w, x):
        drawn = torch.empty(2, 3)
        view = drawn.view(6)
        drawn.bernoulli_(0.5)
        return (w * x).exp().sum(), (view.clone(), drawn)

    wrong(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CompilerWarning)
        per_sample_grads(noisy, W, torch.randn(4, 6), (ps.Norm(), ps.Aux()), randomness="same", engine="compiled")


@pytest.mark.parametrize(
    ("one", "other", "is_close"),
    [
        ([1.0, 2.0], [1.0, 2.0001], True),
        ([1.0, 2.0], [1.0, 2.01], False),
        ([1e-9, 2.0], [0.0, 2.0], True),  # beside the largest
        ([torch.nan, torch.inf], [torch.nan, torch.inf], True),
        ([torch.nan, 1.0], [0.0, 1.0], False),
        ([torch.inf, 1.0], [-torch.inf, 1.0], False),
        ([1j, 2.0], [1j, 2.01], False),
        ([1, 2], [1, 3], False),
        ([], [], True),
    ],
)
def test_closeness(one, other, is_close):
    assert checking._is_close(torch.tensor(one), torch.tensor(other), 1e-3) is is_close


def nearest(w, x):
    return F.interpolate((w * x)[None, None], size=7, mode="nearest").square().sum()


def pooled(w, x):
    images = (w * x).view(1, 2, 3)
    return F.avg_pool2d(images, 2, 2, 1, ceil_mode=True, count_include_pad=True).square().sum()


def scaled(w, x):
    return torch.ldexp(w * x, torch.tensor(3)).square().sum()


@pytest.mark.parametrize("loss", [nearest, pooled, scaled])
def test_faults_of_inductor_without_their_corrections(loss, monkeypatch):
    """Real code: where this torch computes an operation wrongly, a warning says so; the result is right in any case."""
    without_corrections(monkeypatch)
    batch = torch.randn(4, 6)
    expected = per_sample_grads(loss, W, batch, ps.Norm(), engine="loop")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompilerWarning)
        found = per_sample_grads(loss, W, batch, ps.Norm(), engine="compiled")
    assert_trees_close(found, expected, 1e-5)
