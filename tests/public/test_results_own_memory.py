"""What a call shares with its surroundings: nothing that could be changed behind anyone's back."""

from __future__ import annotations

import functools
import io

import pytest
import torch
from counting import operations
from tensordict import TensorDict
from torch import nn

import persample as ps
from persample import ArgumentError, LossError, per_sample_grads

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
both_engines = pytest.mark.parametrize("engine", ["eager", "loop"])


class TwoBiases(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        return self.one(x) + self.two(x)


def total(module, x):
    return module(x).sum()


@both_engines
@pytest.mark.parametrize("size", [1, 4])
def test_results_share_no_memory_with_each_other(engine, size):
    """The gradients of two biases that are added are one and the same numbers, but not one memory."""
    got = per_sample_grads(total, TwoBiases(), X[:size], engine=engine)
    assert len({grads.untyped_storage().data_ptr() for grads in got.values()}) == len(got)
    got["one.bias"].zero_()
    assert torch.equal(got["two.bias"], torch.ones(size, 2))


def test_norms_are_computed_once():
    w = {"a": torch.ones(3), "b": torch.ones(5), "large": torch.ones(5000)}

    def loss(w, x):
        return sum((value * x).square().sum() for value in w.values())

    every = [
        ps.ClippedMean(1.0),
        ps.Norm(),
        ps.NoiseScale(),
        ps.ClippedSum(2.0, True),
        ps.Norm(per_param=True),
    ]
    norms = "aten.linalg_vector_norm.default"
    of_norms = operations(per_sample_grads, loss, w, torch.ones(4), ps.Norm()).counts[norms]
    for wanted in (every, every[::-1], every[:3]):
        assert operations(per_sample_grads, loss, w, torch.ones(4), wanted).counts[norms] == of_norms


@both_engines
@pytest.mark.parametrize("scales", [(1e-25, 1.0), (1e25, 1.0), (1e-25, 1e25), (1e-30, 1e-25)])
def test_norms_of_parameters_of_unlike_size(engine, scales):
    def loss(w, x):
        return sum(scale * (value * x).sum() for scale, value in zip(scales, w, strict=True))

    w, x = [torch.ones(3), torch.ones(2)], torch.linspace(1, 2, 6).view(6, 1)
    found = per_sample_grads(loss, w, x, {"all": ps.Norm(), "each": ps.Norm(per_param=True)}, engine=engine)
    rows = [scale * x.double() * size**0.5 for scale, size in zip(scales, (3, 2), strict=True)]
    torch.testing.assert_close(found["all"].double(), torch.cat(rows, 1).norm(dim=1), rtol=1e-5, atol=0)
    for each, row in zip(found["each"], rows, strict=True):
        torch.testing.assert_close(each.double(), row[:, 0], rtol=1e-5, atol=0)


def test_out_of_a_call_fits_another_loss_of_the_same_shapes():
    def weighted(module, x):
        return (module.one(x) + 2 * module.two(x)).sum()

    model = TwoBiases()
    first = per_sample_grads(total, model, X)
    again = per_sample_grads(weighted, model, X, out=first)
    assert again is first
    torch.testing.assert_close(again["one.bias"], torch.ones(4, 2))
    torch.testing.assert_close(again["two.bias"], 2 * torch.ones(4, 2))


def test_out_whose_leaves_are_one_tensor_is_refused():
    shared = torch.zeros(3)
    with pytest.raises(ArgumentError, match=r"out\['b'\]: expected memory of its own, received one that repeats"):
        per_sample_grads(
            lambda p, x: (p["a"] + p["b"]) @ x,
            {"a": torch.ones(3), "b": torch.ones(3)},
            X,
            ps.Mean(),
            out={"a": shared, "b": shared},
        )


@both_engines
def test_aux_never_requires_grad(engine):
    constant = torch.ones(2, requires_grad=True)
    aux = per_sample_grads(lambda w, x: (w @ x, constant), torch.ones(3), X, ps.Aux(), engine=engine)
    assert not aux.requires_grad
    aux.zero_()
    assert torch.equal(constant, torch.ones(2))


@both_engines
@pytest.mark.parametrize("keep", [False, True], ids=["bare", "keep_batch_dim"])
def test_samples_of_a_tensordict_have_no_batch_size(engine, keep):
    """Leaves of equal shapes: nothing but the batch axis tells how large a sample is."""
    nested = TensorDict({"b": X.clone()}, [4, 3])
    batch = TensorDict({"o": X, "q": X.clone(), "n": nested}, [4])
    sizes = []

    def loss(w, sample):
        sizes.append((list(sample.batch_size), list(sample["n"].batch_size)))
        return (w * sample["o"]).sum() * sample.numel()

    got = per_sample_grads(loss, torch.ones(3), batch, engine=engine, keep_batch_dim=keep)
    torch.testing.assert_close(got, X)
    assert set(map(str, sizes)) == {str(([1], [1, 3]) if keep else ([], [3]))}


class Remembers(nn.Module):
    """Makes a buffer, fills one that was None, and keeps a tensor in an attribute, when it first sees data."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("filled", None)

    def forward(self, x):
        if not hasattr(self, "made"):
            self.register_buffer("made", x.detach() * 2)
        self.filled = x * 3
        self.hidden = self.linear(x)
        return self.hidden.sum() + (self.linear.weight * self.made).sum()


@both_engines
def test_what_a_forward_pass_leaves_in_a_module_is_gone(engine):
    model = Remembers()
    got = per_sample_grads(lambda m, x: m(x), model, X, engine=engine)
    torch.testing.assert_close(got["linear.weight"][:, 0], 3 * X)  # every sample made a buffer of its own
    assert not hasattr(model, "made")
    assert not hasattr(model, "hidden")
    assert model.filled is None
    torch.save(model.state_dict(), io.BytesIO())


@both_engines
def test_batches_made_in_inference_mode(engine):
    with torch.inference_mode():
        rolled_out = X.clone()
    torch.testing.assert_close(per_sample_grads(lambda w, x: w @ x, torch.ones(3), rolled_out, engine=engine), X)


@both_engines
def test_decorated_losses_are_called_as_they_are(engine):
    def scaled(loss_fn):
        @functools.wraps(loss_fn)
        def one(w, x):
            return loss_fn(w, x, 2.0)

        return one

    @scaled
    def loss(w, x, scale):
        return scale * (w @ x)

    torch.testing.assert_close(per_sample_grads(loss, torch.ones(3), X, engine=engine), 2 * X)


def test_aux_that_differs_between_samples_on_the_loop():
    seen = []

    def ragged(w, x):
        seen.append(x)
        return w @ x, torch.zeros(len(seen))

    with pytest.raises(LossError, match="aux of the same structure and shapes from every sample"):
        per_sample_grads(ragged, torch.ones(3), X, ps.Aux(), engine="loop")


def test_masked_arrays_are_refused():
    import numpy as np

    with pytest.raises(ArgumentError, match=r"batch: expected an array without a mask.*filled"):
        per_sample_grads(lambda w, x: w @ x, torch.ones(3), np.ma.masked_array(X.numpy(), X.numpy() > 0))


def test_embeddings_with_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    with pytest.raises(ArgumentError, match=r"dense gradients, received '0' \(Embedding\), sparse=True.*sparse=False"):
        per_sample_grads(total, model, torch.tensor([0, 1]))


@pytest.mark.parametrize("engine", ["eager", "loop", "traced"])
def test_tables_that_lookups_change_are_refused(engine):
    model = nn.EmbeddingBag(5, 2, max_norm=0.5)
    before = model.weight.detach().clone()
    with pytest.raises(ArgumentError, match=r"that no lookup changes, received EmbeddingBag, max_norm=0.5.*renorm"):
        per_sample_grads(total, model, torch.tensor([[0, 1]]), engine=engine)
    assert torch.equal(model.weight, before)


def test_sparse_batches_are_refused():
    with pytest.raises(ArgumentError, match=r"batch: expected a dense tensor, received layout torch.sparse_coo.*dense"):
        per_sample_grads(lambda w, x: w @ x, torch.ones(3), X.to_sparse())


@pytest.mark.parametrize("weight", [1e-40, 1e35])
def test_weights_that_float32_cannot_hold_are_refused(weight):
    with pytest.raises(ArgumentError, match=r"weights: expected 4 finite real numbers, received.*beyond 1e±30"):
        per_sample_grads(lambda w, x: w @ x, torch.ones(3), X, ps.Mean(), weights=[weight] * 4)


@pytest.mark.parametrize("bound", ["1.0", None, torch.ones(2)])
def test_clipping_bounds_are_numbers(bound):
    with pytest.raises(ArgumentError, match="max_norm: expected a number >= 0"):
        ps.ClippedSum(bound)


@both_engines
@pytest.mark.parametrize("axis", [2, -1, 1])
def test_the_batch_axis_moves_and_the_others_keep_their_order(axis, engine):
    x = torch.randn(4, 2, 3)
    got = per_sample_grads(
        lambda w, x: (w * x).sum(), torch.ones(2, 3), x.movedim(0, axis), in_dims=(None, axis), engine=engine
    )
    torch.testing.assert_close(got, x)


@both_engines
def test_out_that_overlaps_is_refused_and_views_of_one_buffer_are_not(engine):
    params = {"a": torch.ones(3), "b": torch.ones(3)}

    def loss(p, x):
        return (p["a"] * x).tanh().sum() + p["b"] @ x

    expected = per_sample_grads(loss, params, X, engine=engine)
    buffer = torch.zeros(40)
    for out in (
        {"a": buffer[:12].view(4, 3), "b": buffer[10:22].view(4, 3)},
        {"a": torch.zeros(4, 3), "b": buffer.as_strided((4, 3), (1, 1))},
        {"a": buffer.view(5, 8)[:4, :3], "b": buffer.view(5, 8)[:4, 2:5]},
    ):
        with pytest.raises(ArgumentError, match=r"out\['b'\]: expected memory of its own, received one that repeats"):
            per_sample_grads(loss, params, X, engine=engine, out=out)
    columns = buffer.view(5, 8)[:4, :3], buffer.view(5, 8)[:4, 3:6]
    for a, b in (columns, (buffer[:12].view(4, 3), buffer[12:24].view(4, 3))):
        got = per_sample_grads(loss, params, X, engine=engine, out={"a": a, "b": b})
        assert got["a"] is a
        torch.testing.assert_close(got, expected)


def test_stacks_of_which_one_does_not_fit_out_are_left_as_they_are():
    model, x = nn.Linear(3, 2), X
    for bias in (torch.zeros(4, 5), torch.zeros(4, 2, dtype=torch.float64)):
        out = {"weight": torch.full((4, 2, 3), 7.0), "bias": bias}
        with pytest.raises(ArgumentError, match=r"out\['bias'\]"):
            per_sample_grads(total, model, x, out=out)
        assert torch.equal(out["weight"], torch.full((4, 2, 3), 7.0))


@pytest.mark.parametrize("engine", ["eager", "traced", "compiled"])
def test_out_with_a_negative_bit_has_the_right_sign(engine):
    out = torch.zeros(4, 3, dtype=torch.complex64).conj().imag
    assert out.is_neg()
    got = per_sample_grads(lambda w, x: (w * x).tanh().sum(), torch.ones(3), X, out=out, engine=engine)
    torch.testing.assert_close(got.resolve_neg(), per_sample_grads(lambda w, x: (w * x).tanh().sum(), torch.ones(3), X))
