"""Batch norm in train mode, and other buffers, under ``composite_grads``: exact, and updated once."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from coupled import EXACT, Residual, assert_same, build, draw, graph, uniformity
from torch import nn
from torch.utils.checkpoint import checkpoint

import persample as ps
from persample import ArgumentError, LossError, composite_grads


def encode(model, x):
    return model(x)


def clones(make=Residual):
    model = build(make)
    return model, copy.deepcopy(model)


def buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_untouched(model, before):
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


X = draw(7, 2, 4)
ONE_MORE = {f"{name}.num_batches_tracked": 1 for name in ("norm1", "norm2", "beside")}


def counters(model):
    return {name: int(b) for name, b in model.named_buffers() if name.endswith("tracked")}


class TestFull:
    """The statistics of all samples, and gradients through them, with one chunk in memory."""

    @pytest.mark.parametrize("chunk_size", [1, 3, 7, None], ids=str)
    @pytest.mark.parametrize("momentum", [0.1, None], ids=["momentum", "cumulative"])
    def test_equals_one_plain_forward_pass(self, chunk_size, momentum):
        ours, plain = clones(lambda: Residual(momentum))
        for model in (ours, plain):
            model.drop.p = 0.0
        for step in range(2):
            expected = graph(uniformity, plain(X + step), plain)
            found = composite_grads(
                encode, uniformity, ours, X + step, batched=True, batch_norm="full", chunk_size=chunk_size
            )
            assert_same(found, expected)
            assert_same(buffers(ours), buffers(plain))
        assert counters(ours) == dict.fromkeys(ONE_MORE, 2)

    def test_with_dropout_in_one_chunk(self):
        ours, plain = clones()
        torch.manual_seed(2)
        expected = graph(uniformity, plain(X), plain)
        left = torch.get_rng_state()
        torch.manual_seed(2)
        assert_same(
            composite_grads(encode, uniformity, ours, X, batched=True, batch_norm="full", chunk_size=None), expected
        )
        assert torch.equal(torch.get_rng_state(), left)

    def test_dropout_masks_are_those_of_the_chunks(self):
        """The oracle multiplies by the same masks."""
        model = build(Residual)
        torch.manual_seed(2)
        masks = torch.cat([model.drop(torch.ones(len(chunk), 3, 3, dtype=X.dtype)) for chunk in X.split(3)])
        h = torch.tanh(model.norm1(model.first(X))) * masks
        z = model.norm2(model.second(h.flatten(1))) + model.beside(X).mean(-1).repeat(1, 2)
        expected = graph(uniformity, z, model)
        torch.manual_seed(2)
        found = composite_grads(encode, uniformity, build(Residual), X, batched=True, batch_norm="full", chunk_size=3)
        assert_same(found, expected)

    def test_two_encoders_each_with_its_own_statistics(self):
        ours, plain = clones()
        ours.drop.p = plain.drop.p = 0.0
        inputs = (X, X[:5] * 2 + 1)

        def loss(z):
            return uniformity(torch.cat(z))

        expected = graph(loss, tuple(plain(x) for x in inputs), plain)
        found = composite_grads((encode, encode), loss, ours, inputs, batched=True, batch_norm="full", chunk_size=2)
        assert_same(found, expected)
        assert counters(ours) == ONE_MORE

    @pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(4, track_running_stats=False), lambda: None])
    def test_without_running_statistics_and_without_a_module(self, make):
        norm, x = build(lambda: make() or nn.Identity()), draw(6, 4, seed=1)
        norm.scale = nn.Parameter(draw(4, seed=2))

        def encode(norm, x):
            x = x * norm.scale + norm.scale.square()
            if isinstance(norm, nn.Identity):
                return nn.functional.batch_norm(x, None, None, weight=norm.scale, training=True)
            return norm(x)

        expected = graph(uniformity, encode(norm, x), norm)
        found = composite_grads(encode, uniformity, norm, x, batched=True, batch_norm="full", chunk_size=4)
        assert_same(found, expected)

    def test_half_precision(self):
        ours, plain = clones()
        for model in (ours, plain):
            model.to(torch.bfloat16).drop.p = 0.0
        x = X.to(torch.bfloat16)
        expected = graph(lambda z: uniformity(z.float()), plain(x), plain)
        found = composite_grads(
            encode, lambda z: uniformity(z.float()), ours, x, batched=True, batch_norm="full", chunk_size=3
        )
        assert_same(found, expected, rtol=0.1, atol=0.1)  # of the bias before a batch norm it is noise

    def test_no_batch_norm_at_all(self):
        model = build(lambda: nn.Linear(4, 3))
        expected = graph(uniformity, model(X[:, 0]), model)
        found = composite_grads(encode, uniformity, model, X[:, 0], batched=True, batch_norm="full", chunk_size=3)
        assert_same(found, expected)

    def test_one_sample_has_no_variance(self):
        model = build(lambda: nn.BatchNorm1d(4))
        with pytest.raises(LossError, match="expected more than one number per channel"):
            composite_grads(encode, uniformity, model, draw(1, 4), batched=True, batch_norm="full")
        assert int(model.num_batches_tracked) == 0

    def test_no_samples(self):
        model = build(Residual)
        before = buffers(model)
        for rule in ("full", "chunk"):
            loss, grads = composite_grads(
                encode, lambda z: z.sum(), model, X[:0], batched=True, batch_norm=rule, chunk_size=3
            )
            assert loss == 0
            assert all((g == 0).all() for g in grads.values())
            assert_untouched(model, before)


class TestChunk:
    def test_equals_the_plain_graph_of_the_chunks(self):
        ours, plain = clones()
        torch.manual_seed(2)
        expected = graph(uniformity, torch.cat([plain(chunk) for chunk in X.split(4)]), plain)
        torch.manual_seed(2)
        assert_same(
            composite_grads(encode, uniformity, ours, X, batched=True, batch_norm="chunk", chunk_size=4), expected
        )

    @pytest.mark.parametrize("momentum", [0.1, None], ids=["momentum", "cumulative"])
    def test_running_statistics_move_once_by_the_mean_of_the_chunks(self, momentum):
        ours, plain = clones(lambda: nn.BatchNorm1d(2, momentum=momentum))
        mean, variance = X.mean((0, 2)), sum(len(c) * c.var((0, 2)) for c in X.split(4)) / len(X)
        composite_grads(encode, uniformity_of_channels, ours, X, batched=True, batch_norm="chunk", chunk_size=4)
        share = 0.1 if momentum else 1.0
        assert_same(ours.running_mean, share * mean)
        assert_same(ours.running_var, 1 - share + share * variance)
        assert int(ours.num_batches_tracked) == 1
        plain(X)
        assert_same(ours.running_mean, plain.running_mean)  # as with the whole batch

    def test_one_chunk_is_one_plain_forward_pass(self):
        ours, plain = clones()
        torch.manual_seed(2)
        expected = graph(uniformity, plain(X), plain)
        torch.manual_seed(2)
        found = composite_grads(encode, uniformity, ours, X, batched=True, batch_norm="chunk", chunk_size=None)
        assert_same(found, expected)
        assert_same(buffers(ours), buffers(plain))


def uniformity_of_channels(z):
    return uniformity(z.flatten(1))


class Counting(nn.Module):
    """Buffers of other kinds: a count, an exponential moving average, a mask with −∞, a frozen constant."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("constant", torch.randn(2))

    def forward(self, x):
        z = self.linear(x)
        self.calls += 1
        self.average.mul_(0.9).add_(z.detach().mean(0), alpha=0.1)
        return z + self.calls


class TestOtherBuffers:
    def test_move_once_with_batch_statistics(self):
        model, x = build(Counting), X[:, 0]
        constant = model.constant.clone()
        average = 0.1 * model.linear(x).mean(0)
        composite_grads(encode, uniformity, model, x, batched=True, batch_norm="chunk", chunk_size=2)
        assert int(model.calls) == 1
        assert_same(model.average, average.detach())
        assert torch.equal(model.mask, torch.tensor([0.0, -torch.inf], dtype=X.dtype))
        assert torch.equal(model.constant, constant)

    @pytest.mark.parametrize(
        "options", [{"batched": True, "chunk_size": 3}, {"engine": "loop"}], ids=["batched", "loop"]
    )
    def test_are_left_alone_otherwise(self, options):
        model, x = build(Counting), X[:, 0]
        before = buffers(model)
        one = copy.deepcopy(model)
        expected = graph(uniformity, one.linear(x) + 1, one)  # every call finds a count of 0

        def sample(model, x):
            return model(x if x.ndim == 2 else x[None]) if options.get("batched") else model(x[None])[0]

        assert_same(composite_grads(sample, uniformity, model, x, **options), expected)
        assert_untouched(model, before)

    @pytest.mark.parametrize("chunk_size", [2, None], ids=str)
    def test_spectral_norm_is_one_step_of_its_power_iteration(self, chunk_size):
        ours, plain = clones(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)))
        x = X[:, 0]
        expected = graph(uniformity, plain(x), plain)
        found = composite_grads(encode, uniformity, ours, x, batched=True, batch_norm="chunk", chunk_size=chunk_size)
        assert_same(found, expected)
        assert_same(buffers(ours), buffers(plain), rtol=EXACT)

    def test_nothing_moves_if_the_call_fails(self):
        model = build(Residual)
        before = buffers(model)
        for rule in ("chunk", "full"):
            with pytest.raises(LossError, match="expected to return one real scalar"):
                composite_grads(encode, lambda z: z, model, X, batched=True, batch_norm=rule, chunk_size=4)
        assert_untouched(model, before)


class TestRefused:
    @pytest.mark.parametrize("reduce", [ps.ClippedSum(1.0), ps.Norm(), None], ids=str)
    @pytest.mark.parametrize("rule", ["refuse", "chunk", "full"])
    @pytest.mark.parametrize("way", [{}, {"batched": True}, {"keep_batch_dim": True}], ids=str)
    def test_no_advice_leads_to_another_error(self, way, rule, reduce):
        """With its statistics no sample has a gradient of its own; each message but one names all ways out."""
        with pytest.raises(ArgumentError) as error:
            composite_grads(encode, uniformity, build(Residual), X, reduce=reduce, batch_norm=rule, **way)
        said = str(error.value)
        if rule == "refuse" and "batched" in way:
            assert "Write encode_fn for one sample" in said
        else:
            assert re.search(r"batched=True, reduce=Sum\(\) and .*no meaning there.*\.eval\(\).*GroupNorm", said)

    @pytest.mark.parametrize("options", [{}, {"batched": True}], ids=["samples", "batched"])
    @pytest.mark.parametrize("make", [Residual, lambda: nn.BatchNorm1d(2, track_running_stats=False).eval()])
    def test_by_default_with_the_name_and_the_choice(self, make, options):
        with pytest.raises(ArgumentError, match=r"params: .*BatchNorm1d.*batch_norm='chunk' or batch_norm='full'"):
            composite_grads(encode, uniformity_of_channels, build(make), X, **options)

    @pytest.mark.parametrize("rule", ["chunk", "full"])
    def test_checkpoints_that_would_recompute_with_other_statistics(self, rule):
        model = build(Residual)
        before = buffers(model)
        with pytest.raises(LossError, match="encode_fn checkpoints activations"):
            composite_grads(
                lambda m, x: checkpoint(m, x, use_reentrant=False),
                uniformity,
                model,
                X,
                batched=True,
                batch_norm=rule,
                chunk_size=4,
            )
        assert_untouched(model, before)

    def test_where_no_module_shows_it(self):
        norm = nn.BatchNorm1d(4).double()
        with pytest.raises(LossError, match="normalizes with the statistics of a chunk"):
            composite_grads(lambda w, x: norm(x * w), uniformity, draw(4), X[:, 0], batched=True, chunk_size=3)

    @pytest.mark.parametrize("way", [{}, {"batched": True, "chunk_size": 3}], ids=["keep_batch_dim", "batched"])
    def test_eval_mode_works(self, way):
        model = build(Residual).eval()
        before = buffers(model)
        expected = graph(uniformity, model(X), model)
        options = way or {"keep_batch_dim": True}
        assert_same(composite_grads(encode, uniformity, model, X, **options), expected)
        assert_untouched(model, before)
