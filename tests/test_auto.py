"""``engine="auto"``: eager, and where vmap cannot, the loop, with one warning."""

from __future__ import annotations

import warnings

import pytest
import torch
from oracle import assert_trees_close

from persample import ArgumentError, FallbackWarning, LossError, Mean, Norm, per_sample_grads

F64 = torch.float64
W = torch.randn(3, dtype=F64, generator=torch.Generator().manual_seed(0))
X = torch.randn(6, 3, dtype=F64, generator=torch.Generator().manual_seed(1))


def branches(w, x):
    return w @ x if x.sum() > 0 else (w @ x) ** 2


def draws(w, x):
    noise = torch.rand(3, dtype=F64)
    return (w * noise) @ x * x[0].item(), noise


def strides(w, x):
    return (w[:2] * x.as_strided((2,), (1,), 1)).sum().sin()


def raises(w, x):
    if x.sum() > 0:
        raise ValueError("mine")
    return w @ x


def test_a_loss_that_vmap_takes_is_eager():
    def loss(w, x):
        return (w @ x).sin()

    assert torch.equal(per_sample_grads(loss, W, X, engine="auto"), per_sample_grads(loss, W, X))


@pytest.mark.parametrize("options", [{}, {"chunk_size": 4}, {"weights": [0, 1, 2, 0, 1, 1]}], ids=str)
def test_a_loss_that_vmap_cannot_take_is_looped_with_one_warning(options):
    wanted = {"mean": Mean(), "norms": Norm()}
    with pytest.warns(FallbackWarning, match="6 samples one after another.*reads values of a sample") as caught:
        found = per_sample_grads(branches, W, X, wanted, engine="auto", **options)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert_trees_close(found, per_sample_grads(branches, W, X, wanted, engine="loop", **options), 1e-12)
    with pytest.raises(LossError, match="reads values of a sample"):
        per_sample_grads(branches, W, X, wanted, **options)


def test_what_vmap_would_compute_wrongly_is_looped():
    with pytest.warns(FallbackWarning, match="one after another"):
        found = per_sample_grads(strides, W, X, Norm(), engine="auto")
    assert_trees_close(found, per_sample_grads(strides, W, X, Norm(), engine="loop"), 1e-12)


@pytest.mark.parametrize("reduce", [None, Norm()], ids=str)
def test_what_is_no_loss_is_refused(reduce):
    for loss, words in ((lambda w, x: w * x, r"received shape \[3\]"), (lambda w, x: x.sum(), "depends on none of")):
        with pytest.raises(LossError, match=words):
            per_sample_grads(loss, W, X, reduce, engine="auto")


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_the_random_stream_is_that_of_the_loop(randomness):
    found = []
    for engine in ("loop", "auto"):
        torch.manual_seed(5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            found.append(per_sample_grads(draws, W, X, engine=engine, randomness=randomness))
        found[-1] = found[-1], torch.rand(3)
    assert_trees_close(found[1], found[0], 0)


def test_errors_of_the_loss_are_those_of_the_loop():
    def late(w, x):
        return w @ x * (x[0].item() + 1) @ x  # @ of a scalar

    with pytest.raises(RuntimeError, match="both arguments to matmul"):
        per_sample_grads(late, W, X, engine="auto")
    with pytest.raises(LossError, match="drew random numbers"):
        per_sample_grads(draws, W, X, engine="auto")
    with pytest.raises(LossError, match="reads values of a sample"):  # before its own error
        per_sample_grads(raises, W, X)
    with pytest.raises(ValueError, match="mine"):
        per_sample_grads(raises, W, X, engine="auto")


def test_under_a_transform_of_the_callers_there_is_no_loop():
    with pytest.raises(LossError, match="reads values of a sample"):
        torch.func.vmap(lambda w: per_sample_grads(branches, w, X, engine="auto"))(W[None])


def test_no_samples():
    assert per_sample_grads(branches, W, X[:0], engine="auto").shape == (0, 3)


def test_bad_arguments():
    with pytest.raises(ArgumentError, match="'eager' or 'compiled' or 'loop' or 'auto', received 'automatic'"):
        per_sample_grads(branches, W, X, engine="automatic")
