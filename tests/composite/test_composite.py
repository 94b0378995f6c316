"""``composite_grads`` against the plain graph of all samples, in float64."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import transformers
from coupled import F64, assert_same, build, draw, encode_pair, graph, info_nce, mlp, two_towers, uniformity
from tensordict import TensorDict
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

import persample as ps
from persample import LossError, composite_grads, per_sample_grads
from persample.utils.measure import peak_memory


def list_wise_softmax(z):
    """ListNet: scores against relevances that come with the samples."""
    return -(torch.softmax(z["relevance"], 0) * torch.log_softmax(z["score"], 0)).sum()


def of_means(z):
    return torch.sin(z.mean(0)).prod() + z.square().mean(0).log().sum()


def sample_by_sample(encode, params, inputs):
    rows = [encode(params, *sample) for sample in zip(*inputs, strict=True)]
    return torch.utils._pytree.tree_map(lambda *z: torch.stack(z), *rows)


WAYS = {
    "default": {},
    "chunks": {"chunk_size": 3},
    "all-at-once": {"chunk_size": None},
    "keep_batch_dim": {"keep_batch_dim": True, "chunk_size": 4},
    "loop": {"engine": "loop", "chunk_size": 3},
    "batched": {"batched": True, "chunk_size": 3},
}
COUPLED = {
    "uniformity": (lambda m, x, r: m(x), uniformity),
    "list-wise": (lambda m, x, r: {"score": m(x).sum(-1), "relevance": r}, list_wise_softmax),
    "of-means": (lambda m, x, r: m(x), of_means),
    "of-two": (lambda m, x, r: (m(x), [m(-x).square()]), lambda z: (z[0].mT @ z[1][0]).square().sum().sqrt()),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", COUPLED)
class TestEqualsThePlainGraph:
    def test_of_a_module(self, name, way):
        encode, loss = COUPLED[name]
        model, inputs = mlp(), (draw(7, 5), draw(7, seed=1))
        expected = graph(loss, sample_by_sample(encode, model, inputs), model)
        assert_same(composite_grads(encode, loss, model, inputs, **WAYS[way]), expected)

    def test_of_functional_parameters(self, name, way):
        encode, loss = COUPLED[name]
        model, inputs = mlp(), (draw(7, 5), draw(7, seed=1))
        params = dict(model.named_parameters())
        expected = graph(loss, sample_by_sample(encode, model, inputs), model)

        def functional(params, x, r):
            return encode(lambda x: torch.func.functional_call(model, params, x), x, r)

        assert_same(composite_grads(functional, loss, params, inputs, **WAYS[way]), expected)

    @pytest.mark.parametrize("n", [1, 2, 3, 6])
    def test_for_few_samples(self, name, way, n):
        encode, loss = COUPLED[name]
        model, inputs = mlp(), (draw(n, 5), draw(n, seed=1))
        expected = graph(loss, sample_by_sample(encode, model, inputs), model)
        assert_same(composite_grads(encode, loss, model, inputs, **WAYS[way]), expected)


@pytest.mark.parametrize("way", WAYS)
def test_no_samples(way):
    model = mlp()
    loss, grads = composite_grads(lambda m, x: m(x), lambda z: z.sum() + 2, model, draw(0, 5), **WAYS[way])
    assert loss == 2
    assert {name: g.abs().sum().item() for name, g in grads.items()} == dict.fromkeys(grads, 0)
    assert [g.shape for g in grads.values()] == [p.shape for p in model.parameters()]


class TestSeveralEncoders:
    @pytest.mark.parametrize("tied", [False, True], ids=["separate", "tied"])
    @pytest.mark.parametrize("way", WAYS)
    def test_of_pairs_with_a_temperature(self, way, tied):
        towers, inputs, scale = two_towers(tied=tied), (draw(7, 5), draw(7, 5, seed=1)), draw(1)[0].requires_grad_()
        expected = graph(info_nce, sample_by_sample(encode_pair, towers, inputs), towers, scale)
        assert_same(composite_grads(encode_pair, info_nce, towers, inputs, loss_params=scale, **WAYS[way]), expected)

    @pytest.mark.parametrize("tied", [False, True], ids=["separate", "tied"])
    @pytest.mark.parametrize("way", WAYS)
    def test_with_samples_of_their_own(self, way, tied):
        """Three queries, eleven passages: encoders in a dict."""
        towers, scale = two_towers(tied=tied), draw(1)[0].requires_grad_()
        inputs = {"passage": draw(11, 5, seed=1), "query": draw(3, 5)}
        encoders = {"query": lambda towers, x: towers["query"](x), "passage": lambda towers, x: towers["passage"](x)}
        z = {name: sample_by_sample(encoders[name], towers, (x,)) for name, x in inputs.items()}
        expected = graph(info_nce, z, towers, scale)
        assert_same(composite_grads(encoders, info_nce, towers, inputs, loss_params=scale, **WAYS[way]), expected)

    @pytest.mark.parametrize("way", WAYS)
    def test_one_of_them_frozen(self, way):
        towers, scale = two_towers(tied=False), draw(1)[0].requires_grad_()
        towers["passage"].requires_grad_(requires_grad=False)
        encoders = (lambda towers, x: towers["query"](x), lambda towers, x: towers["passage"](x))
        inputs = (draw(4, 5), draw(6, 5, seed=1))

        def loss(scale, z):
            return info_nce(scale, {"query": z[0], "passage": z[1]})

        z = tuple(sample_by_sample(f, towers, (x,)) for f, x in zip(encoders, inputs, strict=True))
        value, (grads, by_scale) = graph(loss, z, towers, scale)
        found, (ours, by_scale_ours) = composite_grads(encoders, loss, towers, inputs, loss_params=scale, **WAYS[way])
        assert_same((found, ours, by_scale_ours), (value, grads, by_scale))
        assert not any(name.startswith("passage") for name in ours)

    def test_one_that_the_loss_does_not_look_at(self):
        towers = two_towers(tied=False)
        encoders = (lambda towers, x: towers["query"](x), lambda towers, x: towers["passage"](x))
        _, grads = composite_grads(encoders, lambda z: uniformity(z[0]), towers, (draw(4, 5), draw(6, 5)))
        assert all((g == 0).all() == name.startswith("passage") for name, g in grads.items())


def test_gradients_of_the_loss_parameters_own_their_memory():
    shift = torch.zeros(3, dtype=F64)
    _, (_, grad) = composite_grads(
        lambda w, x: w * x, lambda shift, z: z.sum() + shift.sum(), draw(5), draw(4, 5), loss_params=shift
    )
    grad[0] = 2  # of a sum it is one number, expanded
    assert grad.tolist() == [2, 1, 1]


def test_parameters_of_the_loss_as_a_module():
    model, head, x = mlp(), build(lambda: nn.Linear(4, 1)), draw(6, 5)
    head.bias.requires_grad_(requires_grad=False)
    z = torch.stack([model(row) for row in x])
    value = torch.logsumexp(head(z), 0).sum()
    expected = torch.autograd.grad(value, [*model.parameters(), head.weight])
    found, (grads, own) = composite_grads(
        lambda m, x: m(x), lambda head, z: torch.logsumexp(head(z), 0).sum(), model, x, loss_params=head
    )
    assert_same([found, *grads.values(), own["weight"]], [value.detach(), *expected])
    assert list(own) == ["weight"]


class TestRandomness:
    """The second pass replays the first; afterwards the streams stand where the first pass and the loss left them."""

    @staticmethod
    def plain(model, x, way):
        chunks = x.split(way.get("chunk_size", 1) or len(x))
        if way.get("batched"):
            return torch.cat([model(chunk) for chunk in chunks])
        if way.get("engine") == "loop":
            return torch.stack([model(row) for row in x])
        params = dict(model.named_parameters())
        one = torch.vmap(lambda row: torch.func.functional_call(model, params, row), randomness="different")
        return torch.cat([one(chunk) for chunk in chunks])

    @pytest.mark.parametrize("way", WAYS)
    def test_dropout_is_exact(self, way):
        model, x = mlp(dropout=0.4), draw(7, 5)
        torch.manual_seed(3)
        expected = graph(uniformity, self.plain(model, x, WAYS[way]), model)
        left = torch.get_rng_state()
        torch.manual_seed(3)
        assert_same(composite_grads(lambda m, x: m(x), uniformity, model, x, **WAYS[way]), expected)
        assert torch.equal(torch.get_rng_state(), left)
        torch.manual_seed(4)
        other, _ = composite_grads(lambda m, x: m(x), uniformity, model, x, **WAYS[way])
        assert (other - expected[0]).abs() > 1e-3

    def test_two_encoders_with_dropout(self):
        model, inputs = mlp(dropout=0.4), (draw(4, 5), draw(6, 5, seed=1))
        encoders = (lambda m, x: m(x), lambda m, x: m(x) + 1)
        torch.manual_seed(3)
        z = [f(model, x) for f, xs in zip(encoders, inputs, strict=True) for x in xs.split(2)]
        expected = graph(lambda z: uniformity(torch.cat(z)), z, model)
        torch.manual_seed(3)
        found = composite_grads(encoders, lambda z: uniformity(torch.cat(z)), model, inputs, batched=True, chunk_size=2)
        assert_same(found, expected)

    @pytest.mark.parametrize("engine", ["eager", "loop"])
    def test_a_loss_that_draws_draws_once(self, engine):
        model, x = mlp(dropout=0.4), draw(5, 5)

        def loss(z):
            return (uniformity(z) * torch.rand(())).sum()

        torch.manual_seed(5)
        z = self.plain(model, x, {"engine": engine})
        expected = graph(loss, z, model)
        left = torch.get_rng_state()
        torch.manual_seed(5)
        assert_same(composite_grads(lambda m, x: m(x), loss, model, x, engine=engine), expected)
        assert torch.equal(torch.get_rng_state(), left)

    @pytest.mark.parametrize("way", ["batched", "loop"])
    def test_numpy_and_python_streams(self, way):
        """As in the masking of speech models."""
        w, x = draw(5).requires_grad_(), draw(6, 5)

        def encode(w, x):
            return x * w * np.random.rand() + random.random()  # noqa: NPY002

        def seed():
            np.random.seed(1)  # noqa: NPY002
            random.seed(1)

        seed()
        split = 2 if way == "batched" else 1
        z = torch.cat([encode(w, chunk) for chunk in x.split(split)])
        expected = graph(uniformity, z, {"w": w})
        left = (np.random.rand(), random.random())  # noqa: NPY002
        seed()
        options = {"batched": True, "chunk_size": 2} if way == "batched" else {"engine": "loop"}
        loss, grads = composite_grads(encode, uniformity, w, x, **options)
        assert_same((loss, {"w": grads}), expected)
        assert left == (np.random.rand(), random.random())  # noqa: NPY002

    def test_a_backward_pass_that_draws_does_not_disturb_the_next_chunk(self):
        class NoisyBackward(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                torch.rand(3)
                return grad

        model, x = mlp(dropout=0.4), draw(7, 5)
        torch.manual_seed(3)
        expected = graph(uniformity, torch.cat([model(chunk) for chunk in x.split(2)]), model)
        torch.manual_seed(3)
        found = composite_grads(
            lambda m, x: NoisyBackward.apply(m(x)), uniformity, model, x, batched=True, chunk_size=2
        )
        assert_same(found, expected)


class TestReductions:
    """Reductions of the contributions (dL/dzᵢ)(dzᵢ/dθ) of the samples."""

    @pytest.mark.parametrize("way", ["default", "chunks", "all-at-once", "keep_batch_dim", "loop"])
    def test_equal_those_of_the_shares(self, way):
        model, x = mlp(), draw(7, 5)
        z = torch.stack([model(row) for row in x]).detach().requires_grad_()
        (cotangents,) = torch.autograd.grad(uniformity(z), z)
        direction = {name: torch.ones_like(p) for name, p in model.named_parameters()}
        wanted = {
            "rows": None,
            "sum": ps.Sum(),
            "clipped": ps.ClippedSum(0.1),
            "norms": ps.Norm(),
            "gram": ps.Gram(),
            "cosines": ps.CosineSimilarity(),
            "variance": ps.Variance(),
            "dot": ps.Dot(direction),
        }
        expected = per_sample_grads(lambda m, x, c: m(x) @ c, model, (x, cotangents), wanted, engine="loop")
        _, found = composite_grads(lambda m, x: m(x), uniformity, model, x, reduce=wanted, **WAYS[way])
        assert_same(found, expected)
        assert_same({name: rows.sum(0) for name, rows in found["rows"].items()}, found["sum"])

    def test_rows_of_several_encoders_follow_each_other(self):
        w, inputs = draw(5), (draw(2, 5), draw(3, 5, seed=1))
        encoders = (lambda w, x: (w * x).sum(), lambda w, x: (w * x).sum().sin())

        def loss(z):
            return torch.logsumexp(torch.cat(z), 0)

        _, rows = composite_grads(encoders, loss, w, inputs, reduce=None)
        first, second = inputs
        p = torch.softmax(torch.cat([first @ w, (second @ w).sin()]), 0)
        assert_same(rows, p[:, None] * torch.cat([first, second * (second @ w).cos()[:, None]]))
        _, gram = composite_grads(encoders, loss, w, inputs, reduce=ps.Gram())
        assert_same(gram, rows @ rows.T)


class TestDtypes:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
    def test_half_z_of_float32_parameters(self, dtype, way):
        """Products with dL/dz and sums over samples are float32, as in the plain graph."""
        model, x = mlp().float(), draw(7, 5, dtype=torch.float32)

        def encode(model, x):
            return model(x).to(dtype)

        def loss(z):
            assert z.dtype == dtype
            return uniformity(z.float() / 4)

        expected = graph(loss, sample_by_sample(encode, model, (x,)), model)
        found = composite_grads(encode, loss, model, x, **WAYS[way])
        assert_same(found, expected, rtol=2e-6)
        assert {g.dtype for g in found[1].values()} == {torch.float32}

    def test_half_parameters_are_accumulated_in_float32(self):
        """4096 equal contributions of 1: a sum in float16 would stop at 2048, in bfloat16 at 256."""
        for dtype in (torch.float16, torch.bfloat16):
            w, x = torch.ones((), dtype=dtype), torch.ones(4096, dtype=dtype)
            for options in ({"chunk_size": 64}, {"chunk_size": 16, "batched": True}):
                _, grad = composite_grads(lambda w, x: w * x, lambda z: z.float().sum(), w, x, **options)
                assert grad == 4096
                assert grad.dtype == dtype

    @pytest.mark.parametrize("way", ["default", "loop", "batched"])
    def test_autocast(self, way):
        model = build(lambda: nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4))).float()
        x = draw(7, 5, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = graph(uniformity, torch.stack([model(row) for row in x]), model)
            found = composite_grads(lambda m, x: m(x), uniformity, model, x, **WAYS[way])
        assert_same(found, expected, rtol=2e-2)
        assert {g.dtype for g in found[1].values()} == {torch.float32}

    def test_complex_z_and_parameters(self):
        w, x = torch.randn(3, 5, dtype=torch.complex128, requires_grad=True), draw(6, 5)

        def loss(z):
            return (z @ z.mH).abs().sum().log()

        expected = graph(loss, torch.stack([w @ row.to(w.dtype) for row in x]), {"w": w})
        for way in ("default", "loop"):
            value, grads = composite_grads(lambda w, x: w @ x.to(w.dtype), loss, w, x, **WAYS[way])
            assert_same((value, {"w": grads}), expected)

    def test_z_that_is_infinite_in_both_passes(self):
        w, x = draw(3), torch.tensor([[0.0, 1.0, 2.0], [1.0, 1.0, 2.0]], dtype=F64)

        def encode(w, x):
            return {"value": (w * x).sum(), "log": x.log().sum()}  # log 0

        _, grads = composite_grads(encode, lambda z: z["value"].square().sum(), w, x)
        assert_same(grads, 2 * (x @ w) @ x)


class TestInputs:
    def test_what_is_no_tensor_passes_through(self):
        seen = set()

        def encode(w, x, options, name):
            seen.add((options["mode"], options["scale"], options["none"], name))
            return x * w * options["scale"]

        options = {"mode": "cls", "scale": 2.0, "none": None}
        for extra in ({}, {"batched": True, "chunk_size": 2}, {"engine": "loop"}):
            _, grads = composite_grads(encode, uniformity, draw(5), (draw(3, 5), options, "name"), **extra)
            assert grads.shape == (5,)
        assert seen == {("cls", 2.0, None, "name")}

    @pytest.mark.parametrize("batched", [False, True])
    def test_what_all_samples_share(self, batched):
        w, x, offset = draw(5).requires_grad_(), draw(6, 5), draw(5, seed=2)
        expected = graph(uniformity, x * w + offset, {"w": w})
        loss, grads = composite_grads(
            lambda w, x, o: x * w + o,
            uniformity,
            w,
            (x, offset),
            in_dims=(None, (0, None)),
            batched=batched,
            chunk_size=4,
        )
        assert_same((loss, {"w": grads}), expected)

    def test_numpy_dicts_and_strided_views(self):
        w = draw(5).requires_grad_()
        x = draw(5, 12, seed=2).T[::2]
        expected = graph(uniformity, torch.stack([row * w for row in x]), {"w": w})
        for inputs in ({"x": x}, {"x": x.numpy()}):
            for way in ("default", "chunks", "batched"):
                loss, grads = composite_grads(lambda w, b: b["x"] * w, uniformity, w, inputs, **WAYS[way])
                assert_same((loss, {"w": grads}), expected)

    def test_parameters_in_nested_trees_that_are_tied_and_ignored(self):
        w = draw(5).requires_grad_()
        params = {"a": [w, {"b": draw(2)}], "c": draw(5, seed=1).requires_grad_()}

        def encode(params, x):
            return params["a"][0] * x + params["c"] * x.square()

        x = draw(4, 5, seed=3)
        value, by = graph(uniformity, torch.stack([encode(params, row) for row in x]), {"w": w, "c": params["c"]})
        loss, grads = composite_grads(encode, uniformity, params, x)
        assert_same([loss, grads["a"][0], grads["c"]], [value, by["w"], by["c"]])
        assert (grads["a"][1]["b"] == 0).all()

    def test_results_own_their_memory_and_need_no_gradient(self):
        x = draw(3, 5)
        with torch.inference_mode():
            loss, grads = composite_grads(lambda w, x: x * w, lambda z: z.sum(), draw(5), x)
        assert not loss.requires_grad
        grads.fill_(0)
        assert torch.equal(x, draw(3, 5))


class TestAccumulate:
    def test_into_grad_of_modules_and_leaves(self):
        model, x, scale = mlp(), draw(6, 5), draw(1)[0].requires_grad_()
        model[0].weight.grad = torch.ones_like(model[0].weight)
        kept = model[0].weight.grad

        def loss(scale, z):
            return scale * uniformity(z)

        _, (grads, by_scale) = composite_grads(
            lambda m, x: m(x), loss, model, x, loss_params=scale, accumulate=True, chunk_size=2
        )
        assert model[0].weight.grad is kept
        assert_same(kept, grads["0.weight"] + 1)
        assert_same(model[4].weight.grad, grads["4.weight"])
        assert_same(scale.grad, by_scale)
        composite_grads(lambda m, x: m(x), loss, model, x, loss_params=scale, accumulate=True, chunk_size=2)
        assert_same(model[4].weight.grad, 2 * grads["4.weight"])

    def test_a_training_loop_is_that_of_the_plain_graph(self):
        ours, plain, x = mlp(), mlp(), draw(6, 5)
        steppers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in (ours, plain)]
        for _ in range(5):
            for stepper in steppers:
                stepper.zero_grad()
            composite_grads(lambda m, x: m(x), of_means, ours, x, accumulate=True)
            of_means(plain(x)).backward()
            for stepper in steppers:
                stepper.step()
        assert_same(list(ours.parameters()), list(plain.parameters()), rtol=1e-7)


class TestBert:
    """A model of a public package, unchanged, with its dropout."""

    def model(self):
        config = transformers.BertConfig(
            vocab_size=40,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=8,
        )
        model = build(lambda: transformers.BertModel(config, add_pooling_layer=False)).train()
        model.embeddings.requires_grad_(requires_grad=False)
        return model

    @staticmethod
    def loss(z):
        return F.cross_entropy(z @ z.flip(0).mT, torch.arange(len(z)))

    def test_in_chunks(self):
        model, ids = self.model(), torch.randint(40, (7, 6), generator=torch.Generator().manual_seed(0))
        mask = (torch.arange(6) < torch.tensor([6, 2, 4, 6, 3, 5, 1])[:, None]).long()

        def encode(model, ids, mask):
            return model(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]

        torch.manual_seed(2)
        z = torch.cat([encode(model, *pair) for pair in zip(ids.split(3), mask.split(3), strict=True)])
        expected = graph(self.loss, z, model)
        torch.manual_seed(2)
        before = {name: p.clone() for name, p in model.state_dict().items()}
        found = composite_grads(encode, self.loss, model, (ids, mask), batched=True, chunk_size=3)
        assert_same(found, expected)
        assert not any(name.startswith("embeddings") for name in found[1])
        assert_same(dict(model.state_dict()), before, rtol=0)
        assert model.training

    def test_sample_by_sample(self):
        model, ids = self.model().eval(), torch.randint(40, (5, 6), generator=torch.Generator().manual_seed(0))
        expected = graph(self.loss, model(input_ids=ids).last_hidden_state[:, 0], model)

        def encode(model, ids):
            return model(input_ids=ids, attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool)).last_hidden_state[:, 0]

        found = composite_grads(encode, self.loss, model, ids, keep_batch_dim=True, chunk_size=3)
        assert_same(found, expected)


class TestEncoders:
    """Layers and containers of other packages."""

    @pytest.mark.parametrize("way", ["default", "chunks", "loop", "batched"])
    def test_recurrent(self, way):
        model, x = build(lambda: nn.GRU(5, 4, batch_first=True)), draw(6, 3, 5)
        expected = graph(uniformity, model(x)[0][:, -1], model)
        assert_same(composite_grads(lambda m, x: m(x)[0][..., -1, :], uniformity, model, x, **WAYS[way]), expected)

    @pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
    def test_transformer_with_a_fast_path_without_a_graph(self, training):
        model, x = build(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)), draw(6, 3, 8)
        model.train(training)
        torch.manual_seed(1)
        expected = graph(uniformity, torch.cat([model(chunk)[:, 0] for chunk in x.split(4)]), model)
        torch.manual_seed(1)
        found = composite_grads(lambda m, x: m(x)[:, 0], uniformity, model, x, batched=True, chunk_size=4)
        assert_same(found, expected)

    def test_that_differentiates_itself(self):
        def encode(w, x):
            return torch.func.grad(lambda x: torch.tanh(w * x).sum())(x)

        w, x = draw(5).requires_grad_(), draw(6, 5)
        value, expected = graph(uniformity, w * (1 - torch.tanh(x * w).square()), {"w": w})
        loss, grads = composite_grads(encode, uniformity, w, x, chunk_size=4)
        assert_same((loss, {"w": grads}), (value, expected))

    @pytest.mark.parametrize("way", ["default", "keep_batch_dim", "loop", "batched"])
    def test_tensordicts_in_and_a_model_output_out(self, way):
        model, x = mlp(), draw(6, 5)
        inputs = TensorDict({"nested": TensorDict({"x": x}, batch_size=[6])}, batch_size=[6])
        expected = graph(uniformity, model(x), model)

        def encode(model, inputs):
            return BaseModelOutput(last_hidden_state=model(inputs["nested", "x"]))

        found = composite_grads(encode, lambda z: uniformity(z.last_hidden_state), model, inputs, **WAYS[way])
        assert_same(found, expected)


class TestMemory:
    """Counted bytes: beyond z, dL/dz and the graph of the loss, memory is that of one chunk."""

    @staticmethod
    def peaks(method, sizes=(256, 1024)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 2))
        return [peak_memory(lambda n=n: method(model, torch.zeros(n, 32))) for n in sizes]

    @staticmethod
    def loss(z):
        return torch.logsumexp(z.sum(1), 0)

    def by_graph(self, model, x):
        return torch.autograd.grad(self.loss(model(x)), list(model.parameters()))

    def test_of_the_plain_graph_grows_with_n(self):
        few, many = self.peaks(self.by_graph)
        assert many > 2.5 * few

    @pytest.mark.parametrize("batched", [False, True], ids=["eager", "batched"])
    def test_is_flat(self, batched):
        def ours(model, x):
            return composite_grads(lambda m, x: m(x), self.loss, model, x, batched=batched, chunk_size=64)

        few, many = self.peaks(ours)
        beyond = 4 * 2 * (1024 - 256) * 4  # z, dL/dz, and as much again for the pieces of z and the graph of the loss
        assert many - beyond < 1.1 * few
        assert many < self.peaks(self.by_graph)[1] / 1.5

    @pytest.mark.parametrize("batched", [False, True], ids=["eager", "batched"])
    def test_of_z_that_is_a_part_of_what_the_model_returns(self, batched):
        """z is the first of 64 tokens; the other tokens are freed after each chunk."""

        def ours(model, x):
            tokens = x[..., None, :].expand(*x.shape[:-1], 64, 32)
            return composite_grads(
                lambda m, x: m[:-1](x)[..., 0, :2], self.loss, model, tokens, batched=batched, chunk_size=16
            )

        few, many = self.peaks(ours, sizes=(64, 256))
        assert many < 1.1 * few  # 12 MiB more otherwise

    @pytest.mark.parametrize("batched", [False, True], ids=["eager", "batched"])
    def test_under_autocast(self, batched):
        """The cache of autocast, which keeps casts of all parameters until the context ends, is cleared."""

        def ours(model, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return composite_grads(
                    lambda m, x: m(x), lambda z: self.loss(z.float()), model, x, batched=batched, chunk_size=16
                )

        few, many = self.peaks(ours, sizes=(64, 256))
        assert many < 1.1 * few

    @pytest.mark.parametrize("batched", [False, True], ids=["eager", "batched"])
    def test_follows_the_chunk(self, batched):
        def ours(chunk_size):
            return lambda model, x: composite_grads(
                lambda m, x: m(x), self.loss, model, x, batched=batched, chunk_size=chunk_size
            )

        small, large = (self.peaks(ours(chunk_size), sizes=(1024,))[0] for chunk_size in (16, 512))
        assert large > 1.5 * small

    def test_one_graph_is_alive_with_the_loop(self):
        def ours(model, x):
            return composite_grads(lambda m, x: m(x), self.loss, model, x, engine="loop", chunk_size=1)

        few, many = self.peaks(ours, sizes=(4, 16))
        assert many < few + 4096


@pytest.mark.parametrize("way", ["loop", "batched"])
def test_an_encoder_with_checkpoints_of_its_own(way):
    model, x = mlp(dropout=0.4), draw(7, 5)
    torch.manual_seed(3)
    expected = graph(uniformity, TestRandomness.plain(model, x, WAYS[way]), model)
    torch.manual_seed(3)
    found = composite_grads(lambda m, x: checkpoint(m, x, use_reentrant=False), uniformity, model, x, **WAYS[way])
    assert_same(found, expected)


def test_one_more_forward_pass_and_no_more():
    calls = []

    def encode(w, x):
        calls.append(len(x))
        return x * w

    composite_grads(encode, uniformity, draw(5), draw(7, 5), batched=True, chunk_size=3)
    assert calls == [3, 3, 1, 3, 3, 1]


def test_a_frozen_encoder_is_an_error():
    with pytest.raises(LossError, match="encode_fn: expected z that depends on params"):
        composite_grads(lambda w, x: x, uniformity, draw(5), draw(3, 5))
