"""tanh in compiled code: our own for float32, torch's for all others."""

from __future__ import annotations

import sys

import pytest
import torch

from persample import clear_cache, per_sample_grads
from persample.engines.compiled.tanh import tanh

X = torch.cat([torch.linspace(0, 12, 1_000_001), torch.logspace(-38, 1, 200_001)])
EXACT = torch.tanh(X.double())


def test_it_is_right_to_little_more_than_a_unit_in_the_last_place():
    unit = torch.nextafter(EXACT.float(), torch.tensor(2.0)).double() - EXACT.float().double()
    error = ((tanh(X) - EXACT).abs() / unit).max().item()
    assert 0.5 < error < 1.3
    assert torch.equal(tanh(-X), -tanh(X))


def test_its_derivative_near_one_is_as_good_as_rounding_allows():
    slope, exact = 1 - tanh(X).square(), 1 - EXACT.square()
    near = X > 3
    assert (slope - exact)[near].abs().max() < torch.finfo(torch.float32).eps
    assert not slope[X > 9.1].any()


def test_it_ends_at_one_and_keeps_what_is_no_number():
    x = torch.tensor([0.0, 9.1, 100.0, -100.0, torch.inf, -torch.inf, torch.nan])
    torch.testing.assert_close(tanh(x), torch.tanh(x), rtol=0, atol=0, equal_nan=True)
    assert tanh(torch.linspace(-20, 20, 100_001)).abs().max() == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_to_torch(dtype):
    assert tanh(torch.ones(2, dtype=dtype)) is NotImplemented


def test_compiled_losses_use_it(monkeypatch):
    w, x = torch.linspace(-3, 3, 8), torch.randn(5, 8, generator=torch.Generator().manual_seed(0))

    def loss(w, x):
        return torch.tanh(w * x).sum()

    x[0] = 100.0
    expected = per_sample_grads(loss, w.double(), x.double()).float()
    assert not expected[0].any()
    for _ in range(2):  # a program of one size, then one of all
        got = per_sample_grads(loss, w, x, engine="compiled")
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=1e-6)
        assert not got[0].any()
    monkeypatch.setattr(sys.modules["persample.engines.compiled.lower"], "tanh", torch.zeros_like)
    clear_cache()
    # With another in its place, tanh(w x) is 0 and its derivative 1.
    torch.testing.assert_close(per_sample_grads(loss, w, x, engine="compiled"), x)
    clear_cache()
