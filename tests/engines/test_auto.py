"""``engine="auto"``: eager, and where vmap cannot, the loop, with one warning."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings

import numpy as np
import pytest
import torch
from oracle import assert_trees_close
from torch.nn import functional as F

from persample import ArgumentError, FallbackWarning, LossError, Mean, Norm, composite_grads, per_sample_grads

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
    with pytest.raises(
        ArgumentError, match="'eager' or 'traced' or 'compiled' or 'loop' or 'auto', received 'automatic'"
    ):
        per_sample_grads(branches, W, X, engine="automatic")


READS = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "complex": lambda x: complex(x.sum()).real,
    "bool": lambda x: 2.0 if x.sum() > 0 else 3.0,
    "index": lambda x: len("abc"[x.argmax() :]),
    "tolist": lambda x: x.tolist()[0],
    "numpy": lambda x: x.numpy().sum(),
    "asarray": lambda x: np.asarray(x).sum(),
    "math": lambda x: math.sqrt(x.square().sum()),
    "format": lambda x: float(f"{x.sum():.2f}"),
    "in a list": lambda x: 2.0 + (x.sum() in [X[0].sum()]),
    "in a tensor": lambda x: 2.0 + (0.0 in x),
    "equal": lambda x: 2.0 + torch.equal(x, x),
    "allclose": lambda x: 2.0 + torch.allclose(x, 2 * x),
    "is_nonzero": lambda x: 2.0 + torch.is_nonzero(x.sum()),
    "nonzero": lambda x: 2.0 * len(x.nonzero()),
    "mask": lambda x: x[x > 0].sum(),
    "masked_select": lambda x: x.masked_select(x > 0).sum(),
    "unique": lambda x: 2.0 * len(x.round().unique()),
    "bincount": lambda x: torch.bincount((5 * x).long().abs()).amax(),
    "repeat_interleave": lambda x: x.repeat_interleave((5 * x).long().abs()).sum(),
    "slice": lambda x: x[: x.argmax() + 1].sum(),
    "copy": lambda x: copy.deepcopy(x).sum(),
    "storage": lambda x: x.clone().untyped_storage().nbytes(),
    "factorization": lambda x: torch.linalg.cholesky(x[:1, None]).sum(),
    "solution": lambda x: torch.linalg.inv(torch.diag(x.clamp_min(0))).sum(),
    "index of each sample": lambda x: x[(5 * x[0]).long()],
    "row of each sample": lambda x: F.embedding((5 * x[0]).long().abs(), torch.eye(3, dtype=F64)).sum() + 1,
    "sparse": lambda x: torch.sparse.sum(x.to_sparse()),
}


def caught_by_except(read, x):
    try:
        return read(x)
    except Exception:  # noqa: BLE001
        return 1.0


def caught_by_bare_except(read, x):
    try:
        return read(x)
    except:  # noqa: E722
        return 1.0


def caught_by_suppress(read, x):
    with contextlib.suppress(RuntimeError, IndexError):
        return read(x)
    return 1.0


def caught_by_finally(read, x):
    value = 1.0
    try:
        value = read(x)
    finally:
        return value  # noqa: B012


@pytest.mark.parametrize("caught", [caught_by_except, caught_by_bare_except, caught_by_suppress, caught_by_finally])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("w", [W, torch.outer(W, W)], ids=["vector", "layer"])
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning", "ignore:Use of index_put_:UserWarning")
def test_a_caught_error_of_vmap_is_no_error_of_one_sample(w, read, caught):
    def loss(w, x):
        return (w @ x).sin().sum() * caught(read, x)

    with pytest.raises(LossError, match=r"(?s)error was caught that one sample .*engine='loop'.*The error was"):
        per_sample_grads(loss, w, X)
    with pytest.warns(FallbackWarning, match="6 samples one after another.*error was caught"):
        found = per_sample_grads(loss, w, X, engine="auto")
    assert_trees_close(found, per_sample_grads(loss, w, X, engine="loop"), 1e-12)


def test_a_caught_refusal_comes_before_what_the_loss_raises_next():
    def loss(w, x):
        if caught_by_except(READS["float"], x) == 1.0:
            raise ValueError("mine")
        return (w @ x).sum()

    with pytest.raises(LossError, match=r"error was caught .*\(.*test_auto.py:\d+\): `.float.: lambda"):
        per_sample_grads(loss, W, X)
    with pytest.warns(FallbackWarning, match="error was caught"):
        found = per_sample_grads(loss, W, X, engine="auto")
    assert_trees_close(found, X, 1e-12)


def test_an_encoder_that_catches_is_refused():
    def encode(w, x):
        return w * x * caught_by_except(READS["float"], x)

    with pytest.raises(LossError, match="error was caught"):
        composite_grads(encode, lambda z: z.square().sum(), W, X, chunk_size=3)


ALIKE = {
    "sizes": lambda x: (x @ torch.ones(4, dtype=F64)).sum(),
    "view": lambda x: x.expand(2, 3).T.view(-1),
    "axis": lambda x: x.size(1),
    "number as index": lambda x: x[7],
    "number as index of integers": lambda x: x.long()[7],
    "axis of integers": lambda x: x.long().size(1),
    "stack": lambda x: torch.stack([x, x[:2]]),
    "key": lambda x: {}["scale"],
    "attribute": lambda x: x.scale,
    "shared matrix": lambda x: torch.linalg.cholesky(-torch.eye(2)),
    "shared index": lambda x: torch.ones(3)[torch.tensor(7)],
    "type": lambda x: torch.sin("x"),
}


@pytest.mark.parametrize("fails", ALIKE.values(), ids=ALIKE)
@pytest.mark.parametrize("w", [W, torch.outer(W, W)], ids=["vector", "layer"])
@pytest.mark.parametrize("engine", ["eager", "auto"])
def test_an_error_of_every_sample_may_be_caught(w, fails, engine):
    def loss(w, x):
        return (w @ x).sin().sum() * caught_by_except(fails, x)

    assert caught_by_except(fails, X[0]) == 1
    found = per_sample_grads(loss, w, X, engine=engine)
    assert_trees_close(found, per_sample_grads(loss, w, X, engine="loop"), 1e-12)


@pytest.mark.parametrize("engine", ["eager", "auto"])
@pytest.mark.parametrize("params", [W, torch.nn.Linear(3, 1).double()], ids=["vector", "layer"])
def test_a_branch_that_all_samples_take_alike_is_taken(params, engine):
    def loss(w, x):
        y = (w * x).sum() if isinstance(w, torch.Tensor) else w(x).squeeze()
        return y.square() if y.isfinite().all() and not (x < -100).any() else y

    found, expected = (per_sample_grads(loss, params, X, engine=name) for name in (engine, "loop"))
    assert_trees_close(found, expected, 1e-9)
    x = X.clone()
    x[1] = -1000.0
    with pytest.raises(LossError, match="reads values of a sample"):
        per_sample_grads(loss, params, x)
