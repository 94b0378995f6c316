"""tanh in compiled code: as good as torch's, also where units are saturated and nothing but rounding is left."""

from __future__ import annotations

import pytest
import torch

from persample import clear_cache, per_sample_grads


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
