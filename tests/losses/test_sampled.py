"""Losses of the model's own labels: which labels are drawn, and the Fisher matrix of their gradients."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_trees_close
from torch.nn import functional as F

from persample import KroneckerFactors, per_sample_grads
from persample.losses import sampled_nll


def test_labels_come_as_often_as_the_model_says():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64)
    noise = (torch.arange(10000, dtype=torch.float64) + 0.5) / 10000
    losses = sampled_nll(logits.expand(10000, 4), noise)
    nll = -logits.log_softmax(0)
    shares = torch.stack([(losses == x).double().mean() for x in nll])
    assert_trees_close(shares, logits.softmax(0), 1e-3)


@pytest.mark.parametrize("noise", [0.0, 1 - 2**-24, 1.0])
def test_the_ends_are_labels(noise):
    logits = torch.randn(1000)
    losses = -logits.log_softmax(0)
    assert sampled_nll(logits, torch.tensor(noise)) == losses[0 if noise == 0 else -1]


def test_labels_of_probability_zero_are_not_drawn():
    logits = torch.tensor([0.1, 0.2, 0.3] * 30000)
    impossible = torch.tensor([-torch.inf])
    assert sampled_nll(torch.cat([logits, impossible]), torch.tensor(1 - 2**-24)).isfinite()  # sums end below 1
    assert sampled_nll(torch.cat([impossible, logits]), torch.tensor(0.0)).isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_labels_of_half_precision_are_drawn_in_single(dtype):
    """Sums of 1000 equal probabilities in bfloat16 would stop growing at a half."""
    logits, noise = torch.zeros(1000, dtype=dtype, requires_grad=True), (torch.arange(1000) + 0.5) / 1000
    for place in (0, 499, 700, 999):
        (grad,) = torch.autograd.grad(sampled_nll(logits, noise[place]), logits)
        assert grad.argmin() == place


@pytest.mark.parametrize("options", [{}, {"chunk_size": 7}, {"engine": "loop"}, {"engine": "traced"}], ids=str)
def test_second_moments_are_the_fisher_matrix(options):
    """Of noise on a regular grid, the mean over draws is the expectation: the Hessian by the logits."""
    count, w = 4000, torch.tensor([[0.5, -0.2], [0.1, 0.3], [0.0, 1.0]], dtype=torch.float64)
    x = torch.tensor([1.0, -2.0], dtype=torch.float64)
    noise = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    if "chunk_size" in options or "engine" in options:
        count, noise = 400, noise[::10]
    found = per_sample_grads(
        lambda w, x, u: sampled_nll(F.linear(x, w), u), w, (x.expand(count, 2), noise), KroneckerFactors(), **options
    )
    p = (w @ x).softmax(0)
    assert_trees_close(found.S, p.diag() - torch.outer(p, p), 2e-2)
    assert_trees_close(found.A, torch.outer(x, x), 1e-9)


def test_gradients_of_a_gaussian_are_its_noise():
    means, noise = torch.randn(5, 3, requires_grad=True), torch.randn(5, 3)
    sampled_nll(means, noise, "gaussian").sum().backward()
    assert_trees_close(means.grad, -noise, 1e-5)
