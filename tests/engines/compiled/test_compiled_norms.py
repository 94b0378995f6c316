"""Norms in compiled code: right for numbers of any magnitude."""

from __future__ import annotations

import pytest
import torch

from persample import Norm, clear_cache, per_sample_grads

# The least and the largest numbers of float32 among them.
SCALES = (1.0, 1e-45, 1e-40, 1e-38, 1e-30, 1e-25, 1e-20, 1e-19, 1e-12, 3e-10, 1e-9, 1e9, 1e18, 1e19, 1e20, 1e30, 1e36)


def product(w, x):
    return (w * x).sum()


@pytest.fixture(autouse=True)
def _forget():
    yield
    clear_cache()


def norms(x):
    return per_sample_grads(product, torch.ones(x.shape[1:]), x, Norm(), engine="traced")


@pytest.mark.parametrize("size", [1, 5, 256, 700])
def test_magnitudes(size):
    x = torch.cat([torch.randn(4, size) * scale for scale in SCALES])
    x = torch.cat([x, x * torch.randn(size).exp().pow(8)])  # of many magnitudes in one row
    exact = x.double().square().sum(1).sqrt()
    torch.testing.assert_close(norms(x), exact.float(), rtol=4e-7, atol=1.5e-45)


def test_what_is_no_number():
    x = torch.zeros(6, 300)
    x[0, 7], x[1, 7], x[2, 7], x[3, 270], x[4] = torch.nan, torch.inf, -torch.inf, torch.nan, 3e38
    x[3, 2] = torch.inf
    nan, inf = torch.nan, torch.inf
    torch.testing.assert_close(norms(x), torch.tensor([nan, inf, inf, nan, inf, 0]), equal_nan=True)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("equal", [False, True])
def test_rounding(equal, columns):
    x = torch.linspace(1, 2, 2048)[:, None].repeat(1, 1000) if equal else torch.rand(8, 1000) + 0.5
    exact = x.double().square().sum(1).sqrt()
    if columns:  # compiled code adds strided numbers one after the other
        x = x.view(-1, 8, 125).mT.contiguous().mT
    got = per_sample_grads(product, torch.ones(x.shape[1:]), x, Norm(), engine="compiled")
    torch.testing.assert_close(got, exact.float(), rtol=6e-7 if equal else 3e-7, atol=0)
