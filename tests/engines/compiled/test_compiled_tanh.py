"""tanh in compiled code: as good as torch's, also where units are saturated and nothing but rounding is left."""

from __future__ import annotations

import pytest
import torch
from compiler import lowered

from persample import clear_cache, per_sample_grads
from persample.engines.compiled.lower import tanh

X = torch.cat([torch.linspace(0, 12, 1_000_001), torch.logspace(-38, 1, 200_001)])
EXACT = torch.tanh(X.double())


def test_it_is_right_to_little_more_than_a_unit_in_the_last_place():
    unit = torch.nextafter(EXACT.float(), torch.tensor(2.0)).double() - EXACT.float().double()
    assert 0.5 < ((tanh(X) - EXACT).abs() / unit).max().item() < 1.3
    assert torch.equal(tanh(-X), -tanh(X))


def test_its_derivative_near_one_is_as_good_as_rounding_allows():
    slope, exact = 1 - tanh(X).square(), 1 - EXACT.square()
    assert (slope - exact)[X > 3].abs().max() < torch.finfo(torch.float32).eps
    assert not slope[X > 9.1].any()


def test_it_ends_at_one_and_keeps_signs_and_what_is_no_number():
    x = torch.tensor([0.0, -0.0, 9.1, 100.0, -100.0, torch.inf, -torch.inf, torch.nan])
    torch.testing.assert_close(tanh(x), torch.tanh(x), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(tanh(x).signbit()[:-1], x.signbit()[:-1])
    assert tanh(torch.linspace(-20, 20, 100_001)).abs().max() == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_to_torch(dtype):
    assert tanh(torch.ones(2, dtype=dtype)) is NotImplemented


def test_compiled_losses_use_it(monkeypatch):
    graphs = lowered(monkeypatch)
    per_sample_grads(lambda w, x: torch.tanh(w * x), torch.tensor(0.5), torch.randn(3), engine="compiled")
    targets = {node.target for graph in graphs for node in graph.graph.nodes}
    assert torch.ops.aten.copysign.Tensor in targets
    assert torch.ops.aten.tanh.default not in targets
    clear_cache()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_through_tanh(dtype):
    w = torch.linspace(-3, 3, 8, dtype=dtype)
    x = torch.randn(5, 8, dtype=dtype, generator=torch.Generator().manual_seed(0))

    def loss(w, x):
        return torch.tanh(w * x).sum()

    x[0] = 100.0
    expected = per_sample_grads(loss, w.double(), x.double(), engine="loop").to(dtype)
    assert not expected[0].any()
    for _ in range(2):  # a program of one size, then one of all
        got = per_sample_grads(loss, w, x, engine="compiled")
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=1e-6)
        assert not got[0].any()
        x, expected = x[:4], expected[:4]
    clear_cache()


def test_what_is_no_number_stays_so_and_infinities_are_saturated():
    x = torch.tensor([[0.0], [9.1], [100.0], [-100.0], [torch.inf], [-torch.inf], [torch.nan]])

    def loss(w, x):
        return torch.tanh(w + x).sum()

    got = per_sample_grads(loss, torch.zeros(1), x, engine="compiled")
    torch.testing.assert_close(got, 1 - torch.tanh(x).square(), rtol=0, atol=2e-7, equal_nan=True)
    clear_cache()
