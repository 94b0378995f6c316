"""Row 3 of the list of seeds: L = g(f(x₁), …, f(xₙ)) without keeping n graphs, dropout and batch norm included."""

from __future__ import annotations

import copy

import torch
import transformers
from coupled import assert_same, build, draw, graph, uniformity
from live_bytes import LiveBytes
from torch import nn
from torch.nn import functional as F

from persample import composite_grads

CHUNK = 4
X = draw(12, 5)
BATCHED = {"batched": True, "chunk_size": CHUNK}


def encode(model, x):
    return model(x)


def dropout_model():
    return build(lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)))


def batch_norm_model():
    return build(lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))


def by_the_recipe(model, x):
    """The two passes of the answer, unchanged: right for a plain encoder, wrong for dropout and batch norm."""
    with torch.no_grad():
        z = torch.cat([model(chunk) for chunk in x.split(CHUNK)])
    (cotangents,) = torch.autograd.grad(uniformity(z.requires_grad_()), z)
    for chunk, cotangent in zip(x.split(CHUNK), cotangents.split(CHUNK), strict=True):
        model(chunk).backward(cotangent)
    return {name: p.grad for name, p in model.named_parameters()}


def relative_error(grads, expected):
    flat, target = (torch.cat([g.flatten() for g in tree.values()]) for tree in (grads, expected))
    return ((flat - target).norm() / target.norm()).item()


class TestOneGraphAlive:
    @staticmethod
    def peaks(work):
        """Bytes kept for backward passes, for 8 and for 32 samples."""
        model = build(lambda: nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 1)))
        return [LiveBytes().measure(lambda n=n: work(model, draw(n, 5))) for n in (8, 32)]

    @staticmethod
    def loss(z):
        return torch.logsumexp(z, 0).sum()

    def test_the_plain_graph_keeps_all(self):
        few, many = self.peaks(lambda model, x: self.loss(torch.cat([model(chunk) for chunk in x.split(CHUNK)])))
        assert many > 3.9 * few

    def test_ours_keeps_one_chunk(self):
        few, many = self.peaks(lambda model, x: composite_grads(encode, self.loss, model, x, **BATCHED))
        one, _ = self.peaks(lambda model, x: model(x[:CHUNK]))
        assert few == many == one + 8 * CHUNK  # dL/dz of the chunk, one float64 per sample


class TestDropout:
    def test_exact(self):
        model = dropout_model()
        torch.manual_seed(1)
        expected = graph(uniformity, torch.cat([model(chunk) for chunk in X.split(CHUNK)]), model)
        torch.manual_seed(1)
        assert_same(composite_grads(encode, uniformity, model, X, **BATCHED), expected)
        torch.manual_seed(1)
        assert relative_error(by_the_recipe(dropout_model(), X), expected[1]) > 0.1

    def test_replays_the_same_masks(self):
        model, drawn = dropout_model(), []
        model[2].register_forward_hook(lambda _, inputs, output: drawn.append(output.detach() / inputs[0].detach()))
        composite_grads(encode, uniformity, model, X, **BATCHED)
        chunks = len(X) // CHUNK
        first, second = torch.cat(drawn[:chunks]), torch.cat(drawn[chunks:])
        assert set(first.round(decimals=6).unique().tolist()) == {0, 2}
        torch.testing.assert_close(second, first)

    def test_the_recipe_draws_others(self):
        model, drawn = dropout_model(), []
        model[2].register_forward_hook(lambda _, inputs, output: drawn.append(output.detach() / inputs[0].detach()))
        by_the_recipe(model, X)
        chunks = len(X) // CHUNK
        assert not torch.allclose(torch.cat(drawn[chunks:]), torch.cat(drawn[:chunks]))


class TestBatchNorm:
    def test_exact_and_the_running_statistics_move_once(self):
        ours, plain = batch_norm_model(), batch_norm_model()
        expected = graph(uniformity, plain(X), plain)
        found = composite_grads(encode, uniformity, ours, X, batch_norm="full", **BATCHED)
        assert_same(found, expected)
        assert_same(dict(ours.named_buffers()), dict(plain.named_buffers()))
        assert ours[1].num_batches_tracked == 1
        assert ours[1].running_mean.abs().max() > 1e-3

    def test_with_the_statistics_of_chunks(self):
        ours, plain = batch_norm_model(), batch_norm_model()
        expected = graph(uniformity, torch.cat([plain(chunk) for chunk in X.split(CHUNK)]), plain)
        assert_same(composite_grads(encode, uniformity, ours, X, batch_norm="chunk", **BATCHED), expected)
        assert ours[1].num_batches_tracked == 1
        whole = batch_norm_model()
        whole(X)
        assert_same(ours[1].running_mean, whole[1].running_mean)

    def test_the_recipe_moves_them_twice_for_every_chunk(self):
        model, plain = batch_norm_model(), batch_norm_model()
        expected = graph(uniformity, plain(X), plain)
        assert relative_error(by_the_recipe(model, X), expected[1]) > 0.1
        assert model[1].num_batches_tracked == 2 * len(X) / CHUNK


def test_the_recipe_is_right_for_a_plain_encoder():
    """Only dropout and batch norm break the recipe."""
    model = dropout_model().eval()
    assert_same(by_the_recipe(model, X), graph(uniformity, model(X), model)[1])


def test_a_pre_trained_model_needs_no_change(tmp_path):
    """A transformer loaded from a checkpoint by its package, in train mode."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=40, max_position_embeddings=8, **sizes)
    build(lambda: transformers.BertModel(config, add_pooling_layer=False)).save_pretrained(tmp_path)
    model = transformers.BertModel.from_pretrained(tmp_path, add_pooling_layer=False).double().train()
    ids = torch.randint(40, (12, 6), generator=torch.Generator().manual_seed(0))
    weights = copy.deepcopy(model.state_dict())

    def first_token(model, ids):
        return model(input_ids=ids).last_hidden_state[:, 0]

    def contrast(z):
        return F.cross_entropy(z @ z.flip(0).mT, torch.arange(len(z)))

    torch.manual_seed(1)
    expected = graph(contrast, torch.cat([first_token(model, chunk) for chunk in ids.split(CHUNK)]), model)
    torch.manual_seed(1)
    found = composite_grads(first_token, contrast, model, ids, **BATCHED)
    assert_same(found, expected)
    assert_same(model.state_dict(), weights, rtol=0)
    assert type(model) is transformers.BertModel
    assert model.training
    assert all(p.grad is None for p in model.parameters())
