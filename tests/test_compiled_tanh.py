"""tanh in compiled code: our own for float32, torch's for all others."""

from __future__ import annotations

import sys

import pytest
import torch

from persample import clear_cache, per_sample_grads
from persample.engines.compiled.tanh import tanh


def test_it_is_right_to_four_units_in_the_last_place():
    x = torch.cat([torch.linspace(0, 12, 1_000_001), torch.logspace(-38, 1, 200_001)])
    exact = torch.tanh(x.double())
    error = ((tanh(x) - exact) / exact.clamp(min=1e-38)).abs().max().item()
    assert 1e-8 < error < 4 * torch.finfo(torch.float32).eps
    assert torch.equal(tanh(-x), -tanh(x))


def test_it_ends_at_one_and_keeps_what_is_no_number():
    x = torch.tensor([0.0, 9.0, 100.0, -100.0, torch.inf, -torch.inf, torch.nan])
    torch.testing.assert_close(tanh(x), torch.tanh(x), rtol=3e-7, atol=0, equal_nan=True)
    assert tanh(torch.linspace(-20, 20, 100_001)).abs().max() <= 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_to_torch(dtype):
    assert tanh(torch.ones(2, dtype=dtype)) is NotImplemented


def test_compiled_losses_use_it(monkeypatch):
    w, x = torch.linspace(-3, 3, 8), torch.randn(5, 8, generator=torch.Generator().manual_seed(0))

    def loss(w, x):
        return torch.tanh(w * x).sum()

    expected = per_sample_grads(loss, w.double(), x.double()).float()
    for _ in range(2):  # a program of one size, then one of all
        torch.testing.assert_close(per_sample_grads(loss, w, x, engine="compiled"), expected, rtol=2e-6, atol=1e-6)
    monkeypatch.setattr(sys.modules["persample.engines.compiled.lower"], "tanh", torch.zeros_like)
    clear_cache()
    # With another in its place, tanh(w x) is 0 and its derivative 1.
    torch.testing.assert_close(per_sample_grads(loss, w, x, engine="compiled"), x)
    clear_cache()
