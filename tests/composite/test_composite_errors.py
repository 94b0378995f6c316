"""The errors of ``composite_grads`` and their messages."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from coupled import draw, mlp, uniformity
from torch import nn

import persample as ps
from persample import ArgumentError, LossError, composite_grads

X = draw(6, 5)


def encode(w, x):
    return w * x


def call(encode_fn=encode, loss_fn=uniformity, params=None, inputs=X, **options):
    return composite_grads(encode_fn, loss_fn, draw(5) if params is None else params, inputs, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "compiled"}, "engine: expected 'eager' or 'loop', received 'compiled'"),
        ({"batch_norm": "sync"}, "batch_norm: expected 'refuse' or 'chunk' or 'full', received 'sync'"),
        ({"batch_norm": "full"}, "batch_norm: expected 'refuse' for single samples, received full. Pass batched=True"),
        ({"chunk_size": 0}, "chunk_size: expected a positive int or None, received 0"),
        ({"batched": True, "keep_batch_dim": True}, "keep_batch_dim: expected one of the two"),
        ({"batched": True, "in_dims": (0, 0), "params": X}, r"in_dims\[0\]: expected None, received 0"),
        ({"reduce": ps.Loss()}, r"reduce: expected reductions of gradients .* received Loss\(\)"),
        ({"reduce": {"a": ps.Sum(), "b": ps.Aux()}}, r"received Aux\(\). Leave it out"),
        ({"reduce": "mean"}, "reduce: expected reductions such as Mean"),
        ({"reduce": ps.Norm(), "batched": True}, r"reduce: expected Sum\(\) with batched=True.*received Norm\(\)"),
        ({"reduce": None, "batched": True}, r"reduce: expected Sum\(\) with batched=True.*received Stack\(\)"),
        ({"reduce": None, "accumulate": True}, "reduce: expected a single sum over the samples with accumulate=True"),
        ({"reduce": ps.Dot(draw(4))}, r"Dot\(direction\): expected shape \[5\]"),
        ({"accumulate": True}, "params: expected a leaf tensor that requires a gradient.*one without requires_grad"),
        ({"loss_fn": 3}, "loss_fn: expected a function, received int"),
        ({"loss_params": {"t": 3}}, r"loss_params\['t'\]: expected a floating or complex tensor.*received int"),
        ({"encode_fn": 3}, "encode_fn: expected a function, received int"),
        ({"encode_fn": lambda w: w}, r"encode_fn: expected to take params and 1 argument\(s\)"),
        ({"encode_fn": {}}, "inputs: expected the inputs of every encoder"),
        ({"encode_fn": {"a": encode, "b": encode}}, "inputs: expected the inputs of every encoder in the structure"),
        ({"encode_fn": {"a": encode}, "inputs": {"a": (X, X[1:])}}, r"inputs\['a'\]: expected leaves of one common"),
        ({"encode_fn": {"a": 3}, "inputs": {"a": X}}, r"encode_fn\['a'\]: expected a function"),
        ({"inputs": (X, X[1:]), "encode_fn": lambda w, x, y: w}, r"inputs: .* inputs\[0\]: 6, inputs\[1\]: 5"),
        ({"inputs": torch.tensor(1.0)}, "inputs: expected a batch axis 0, received a scalar"),
        ({"params": torch.ones(5, dtype=torch.int64)}, "params: expected a floating or complex tensor"),
    ],
    ids=lambda x: str(x)[:40] if isinstance(x, str) else None,
)
def test_rejected_arguments(options, message):
    with pytest.raises(ArgumentError, match=message):
        call(**options)


def test_a_write_of_the_second_pass_is_named():
    def encode(w, batch):
        if torch.is_grad_enabled():
            batch["mask"].zero_()
        return w * batch["x"]

    with pytest.raises(LossError, match=r"encode_fn wrote in place into inputs\['mask'\]"):
        call(encode, inputs={"x": X, "mask": torch.ones(6)}, engine="loop")


def test_averages_of_no_samples():
    with pytest.raises(ArgumentError, match=r"Mean\(\)"):
        call(inputs=X[:0], reduce=ps.Mean())


def test_accumulating_into_what_was_computed():
    w = draw(5).requires_grad_()
    with pytest.raises(ArgumentError, match=r"params: expected a leaf tensor.*received one that was computed"):
        call(params=2 * w, accumulate=True)
    with pytest.raises(ArgumentError, match="loss_params: expected a leaf tensor"):
        call(params=w, loss_fn=lambda t, z: t * z.sum(), loss_params=torch.tensor(1.0), accumulate=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_fn": lambda z: z}, r"loss_fn: expected to return one real scalar tensor for all samples.*\[6, 5\]"),
        ({"loss_fn": lambda z: (z.sum(), z)}, "loss_fn: expected to return one real scalar .* received tuple"),
        ({"loss_fn": lambda z: z.detach().sum()}, "loss_fn: expected a loss that depends on z"),
        ({"encode_fn": lambda w, x: (w * x).argmax(), "loss_fn": lambda z: z.double().sum()}, "loss that depends on z"),
        ({"encode_fn": lambda w, x: "z"}, "encode_fn: expected z to be a tensor, received str"),
        ({"encode_fn": lambda w, x: {"a": w, "b": 1}}, r"encode_fn: expected z\['b'\] to be a tensor, received int"),
        ({"encode_fn": lambda w, x: ()}, "encode_fn: expected tensors, received an empty tuple"),
        ({"encode_fn": lambda w, x: (w * x)[0], "keep_batch_dim": True}, "expected z to keep the leading axis of 1"),
        ({"encode_fn": lambda w, x: (w * x).sum(), "batched": True}, "to hold one row for each of the 6 samples"),
        ({"encode_fn": lambda w, x: w * x.detach() * 0 + x.item()}, "reads values of a sample"),
        ({"encode_fn": lambda w, x: w * x.mul_(2)}, "encode_fn wrote in place into inputs"),
    ],
    ids=lambda x: str(x)[:40] if isinstance(x, str) else None,
)
def test_what_the_functions_return(options, message):
    with pytest.raises(LossError, match=message):
        call(inputs=X.clone(), **options)


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return x * torch.rand(x.shape[-1], generator=self.generator, dtype=x.dtype)


class OfGradMode(nn.Module):
    def forward(self, x):
        return x * (2 if torch.is_grad_enabled() else 1)


class Growing(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class GrowingForLarge(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * torch.where(x[..., :1] > 50, self.calls, 1)


class TestNotReplayed:
    @pytest.mark.parametrize("options", [{"engine": "loop"}, {"batched": True, "chunk_size": 4}, {}], ids=str)
    @pytest.mark.parametrize("make", [OwnGenerator, Growing, OfGradMode])
    def test_names_the_module(self, make, options):
        model = nn.Sequential(mlp(), make(), nn.Tanh()).double()
        with pytest.raises(
            LossError, match=rf"encode_fn: .* received another z, off by .*module '1' \({make.__name__}\)"
        ):
            composite_grads(lambda m, x: m(x), uniformity, model, X, **options)

    @pytest.mark.parametrize("options", [{"engine": "loop"}, {"batched": True}, {}], ids=str)
    def test_names_the_module_that_differs_for_one_sample_only(self, options):
        model, x = nn.Sequential(GrowingForLarge(), nn.Linear(5, 2)).double(), torch.cat([X, X[:1] + 100])
        with pytest.raises(LossError, match=r"module '0' \(GrowingForLarge\)"):
            composite_grads(lambda m, x: m(x), uniformity, model, x, chunk_size=4, **options)

    def test_names_the_leaf(self):
        generator = np.random.default_rng(0)
        with pytest.raises(LossError, match=r"another z\['noisy'\].*encode_fn itself, outside of any module"):
            call(lambda w, x: {"plain": w * x, "noisy": w * x * generator.random()}, lambda z: uniformity(z["noisy"]))

    def test_leaves_the_streams_where_the_first_pass_left_them(self):
        torch.manual_seed(0)
        network = mlp(0.3)
        for chunk in X.split(4):
            network(chunk)
        left = torch.get_rng_state()
        torch.manual_seed(0)
        model = nn.Sequential(mlp(0.3), Growing())
        with pytest.raises(LossError, match="Growing"):
            composite_grads(lambda m, x: m(x), uniformity, model, X, batched=True, chunk_size=4)
        assert torch.equal(torch.get_rng_state(), left)

    def test_an_only_chunk_is_encoded_once(self):
        calls = []

        def encode(w, x):
            calls.append(len(x))
            return w * x * len(calls)

        composite_grads(encode, uniformity, torch.ones(5).double(), X, batched=True, chunk_size=None)
        assert calls == [len(X)]

    def test_a_small_change_is_one(self):
        """1% of noise, in a single sample, in float32."""
        calls = []

        def encode(w, x):
            calls.append(x)
            return w * x * (1.01 if len(calls) == 8 else 1)

        with pytest.raises(LossError, match=re.escape("received another z")):
            call(encode, params=draw(5).float(), inputs=X.float(), engine="loop")

    def test_rounding_is_none(self):
        calls = []

        def encode(w, x):
            calls.append(x)
            return w * x * (1 + 3e-7 * (len(calls) > 6))

        call(encode, params=draw(5).float(), inputs=X.float(), engine="loop")
        assert len(calls) > 6
