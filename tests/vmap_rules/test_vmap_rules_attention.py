"""Attention and transformer layers under vmap."""

import functools
from contextlib import nullcontext

import pytest
import torch
from counting import FUSED, Operations
from oracle import assert_trees_close
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from vmap_rules_cases import B, check, check_module, draw, once

from persample import LossError, clear_cache, per_sample_grads
from persample.vmap_rules import VmapRules


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("option", ATTENTION)
@pytest.mark.parametrize("lead", [(), (1,)], ids=["heads", "batch-of-one"])
def test_attention(lead, option):
    heads = 4 if option == "grouped" else 2

    def fn(gain, q, k, v):
        return F.scaled_dot_product_attention(gain * q, k, v, **ATTENTION[option])

    qkv = draw(*lead, heads, 5, 3), draw(*lead, 2, 6, 3), draw(*lead, 2, 6, 3)
    check(fn, torch.tensor(1.1, dtype=torch.float64), qkv)


def test_attention_without_a_mask_is_one_call_of_the_fused_kernel_for_all_samples():
    def loss(gain, x):
        with VmapRules():
            return F.scaled_dot_product_attention(gain * x, x, x, is_causal=True).sum()

    with torch.no_grad(), Operations() as mode:
        vmap(once(loss), in_dims=(None, 0))(torch.tensor(1.1), torch.randn(B, 2, 5, 4))
    assert mode.shapes[FUSED] == [((B, 2, 5, 4),) * 3]


STRIDED = {
    "features-first": lambda q, x: (q.mT, x.mT, x.mT),
    "columns": lambda q, x: (q.mT.contiguous().mT, x, x),
    "every-other": lambda q, x: (q[..., ::2], x[..., ::2], x[..., 1::2]),
    "repeated": lambda q, x: (q, x[..., :1].expand(x.shape), x),
}


@pytest.mark.parametrize("kind", STRIDED)
def test_attention_whose_features_do_not_lie_side_by_side(kind):
    def fn(w, x):
        return F.scaled_dot_product_attention(*STRIDED[kind](x @ w, x)).mT

    check(fn, torch.randn(4, 4, dtype=torch.float64), (draw(2, 6, 4),))


def test_attention_to_keys_that_all_samples_share():
    keys = draw(2, 6, 3)

    def fn(gain, q):
        return F.scaled_dot_product_attention(q, gain * keys, keys)

    check(fn, torch.tensor(1.1, dtype=torch.float64), (draw(2, 5, 3),))


@pytest.mark.parametrize("axes", [(0, 0), (1, 2)], ids=str)
@pytest.mark.parametrize("inner", [False, True], ids=["", "inner-vmap"])
def test_operands_that_only_an_outer_vmap_batches(axes, inner):
    x, keys, target = (
        torch.randn(6, 3, 5, 4, dtype=torch.float64),
        torch.randn(6, 2, 5, 4, dtype=torch.float64),
        torch.arange(6),
    )

    def attended(w, x, keys):
        y = (x @ w).unsqueeze(0)
        return F.scaled_dot_product_attention(y, keys.unsqueeze(0), keys.unsqueeze(0)).square().sum()

    def grads(x, keys, target, options):
        def loss(w, x):
            each = vmap(lambda k: attended(w, x, k))(keys).sum() if inner else attended(w, x, keys[0])
            return each + F.cross_entropy((x @ w).flatten().repeat(250), target)

        return per_sample_grads(loss, torch.eye(4, dtype=torch.float64), x, **options)

    moved = x.movedim(0, axes[0]), keys.movedim(0, axes[1])
    result = vmap(lambda *args: grads(*args, {}), in_dims=(*axes, 0))(*moved, target)
    with sdpa_kernel(SDPBackend.MATH):  # vmap has no rule for the other kernel
        truth = [grads(*row, {"engine": "loop"}) for row in zip(x, keys, target, strict=True)]
    torch.testing.assert_close(result, torch.stack(truth), rtol=1e-9, atol=1e-12)


def test_attention_to_fewer_keys_than_values_is_refused():
    def loss(gain, x):
        with VmapRules():
            return F.scaled_dot_product_attention(gain * x, x[:, :3], x).sum()

    with torch.no_grad(), pytest.raises(RuntimeError, match="size"):
        vmap(once(loss), in_dims=(None, 0))(torch.tensor(1.1), torch.randn(B, 2, 5, 4))


@pytest.mark.parametrize(
    "mask", [None, torch.zeros(5, 5), torch.ones(5, 5, dtype=torch.bool)], ids=["plain", "float", "bool"]
)
def test_attention_under_autocast(mask):
    w, x, dtypes = torch.randn(4, 4), torch.randn(B, 2, 5, 4), []

    def loss(w, x):
        with torch.autocast("cpu", torch.bfloat16):
            out = F.scaled_dot_product_attention(x @ w, x, x, attn_mask=mask)
        dtypes.append(out.dtype)
        return out.float().sin().sum()

    def under(w, x):
        with VmapRules():
            return loss(w, x)

    with torch.no_grad():
        grads = vmap(once(under), in_dims=(None, 0))(w, x)
    assert dtypes == [torch.bfloat16]
    w.requires_grad_()
    rows = [torch.autograd.grad(loss(w, row), w)[0] for row in x]  # torch.func fails on it
    assert_trees_close(grads, torch.stack(rows), 0.05)


@pytest.mark.parametrize("kind", ["bool", "float", "nothing-to-see"])
def test_attention_mask(kind):
    mask = torch.rand(B, 5, 5) < 0.5 if kind != "float" else draw(5, 5)
    if kind != "float":
        mask |= torch.eye(5, dtype=torch.bool)
    if kind == "nothing-to-see":
        mask[:, 2] = False

    def fn(gain, qkv, mask):
        return F.scaled_dot_product_attention(gain * qkv[None], *qkv.expand(2, 1, 2, 5, 3), attn_mask=mask)

    check(fn, torch.tensor(1.1, dtype=torch.float64), (draw(2, 5, 3), mask))


MASKS = {
    "none": None,
    "bool": torch.ones(5, 6, dtype=torch.bool).tril(),
    "nothing-to-see": torch.ones(5, 6, dtype=torch.bool).tril(-2),
    "float": torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6),
    "nan": torch.full((5, 6), torch.nan, dtype=torch.float64).tril(-3),
}


@pytest.mark.parametrize("grouped", [False, True], ids=["", "grouped"])
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"dropout_p": 0.4}], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_attention_is_that_of_the_math_kernel(mask, options, grouped):
    q, k, v = draw(4 if grouped else 2, 5, 4), draw(2, 6, 4), draw(2, 6, 4)

    def loss(w, q, k, v):
        given = {"attn_mask": MASKS[mask], "enable_gqa": grouped, **options}
        return F.scaled_dot_product_attention(q @ w, k, v @ w, **given).square().sum()

    w = torch.randn(4, 4, dtype=torch.float64)
    results = []
    for context, engine in ((nullcontext(), "eager"), (sdpa_kernel(SDPBackend.MATH), "loop")):
        torch.manual_seed(3)
        with context:  # under "same", both draw the same numbers
            randomness = "same" if "dropout_p" in options else "error"
            results.append(per_sample_grads(loss, w, (q, k, v), engine=engine, randomness=randomness))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12, equal_nan=True)


BATCH_MASKS = {
    "padding": (torch.arange(6) < torch.tensor([[6], [4], [1]]), lambda m: m[None, None]),
    "padding-or-later": (torch.arange(6) < torch.tensor([[6], [4], [1]]), lambda m: m & TRIANGLE),
    "nothing-to-see": (torch.arange(6) < torch.tensor([[6], [0], [3]]), lambda m: m[None]),
    "least": (torch.arange(6) < torch.tensor([[6], [0], [3]]), lambda m: (~m)[None].double() * torch.finfo().min),
    "float": (torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).double(), lambda m: m[:, None] + m),
    "of-heads": (torch.randn(3, 4, 1, 6, generator=torch.Generator().manual_seed(0)).double(), lambda m: m),
    "nan": (torch.tensor([[0.0] * 6, [0.0, torch.nan] * 3, [0.0] * 6]).double(), lambda m: m[None]),
    "infinite": (torch.tensor([[0.0] * 6, [0.0, torch.inf] * 3, [0.0] * 6]).double(), lambda m: m[None]),
}
TRIANGLE = torch.ones(6, 6, dtype=torch.bool).tril()


@pytest.mark.parametrize("engine", ["eager", "traced"])
@pytest.mark.parametrize("lead", [(), (1,), (2,)], ids=["heads", "batch-of-one", "batch-of-two"])
@pytest.mark.parametrize("kind", BATCH_MASKS)
def test_masks_of_samples_and_shared_heads_go_to_the_fused_kernel(kind, lead, engine):
    masks, of_scores = BATCH_MASKS[kind]

    def loss(w, q, k, v, mask):
        options = {"attn_mask": of_scores(mask), "enable_gqa": True}
        return F.scaled_dot_product_attention(q @ w, k @ w, v @ w, **options).square().sum()

    batch = torch.randn(3, *lead, 4, 6, 8), torch.randn(3, *lead, 2, 6, 8), torch.randn(3, *lead, 2, 6, 8)
    batch = *(x.double() for x in batch), masks
    w = torch.randn(8, 8, dtype=torch.float64) / 3
    result = per_sample_grads(loss, w, batch, engine=engine)
    with sdpa_kernel(SDPBackend.MATH):
        truth = per_sample_grads(loss, w, batch, engine="loop")
    torch.testing.assert_close(result, truth, rtol=1e-9, atol=1e-12, equal_nan=True)
    clear_cache()
    with Operations() as mode:
        per_sample_grads(loss, w, batch)
    assert FUSED in mode.shapes


@pytest.mark.parametrize("spelling", ["mask", "sum"])
def test_masks_with_gradients(spelling):
    def loss(params, x):
        bias = params["bias"] if spelling == "mask" else params["bias"] + x @ x.mT
        return F.scaled_dot_product_attention(x @ params["w"], x, x, attn_mask=bias).square().sum()

    params = {"w": torch.randn(4, 4).double(), "bias": torch.randn(5, 5).double()}
    x = torch.randn(3, 2, 5, 4).double()
    with sdpa_kernel(SDPBackend.MATH):
        truth = per_sample_grads(loss, params, x, engine="loop")
    for engine in ("eager", "traced"):
        torch.testing.assert_close(per_sample_grads(loss, params, x, engine=engine), truth, rtol=1e-9, atol=1e-12)


def test_heads_that_shared_keys_do_not_divide_are_refused():
    def loss(w, x, k):
        return F.scaled_dot_product_attention(x @ w, k, k, enable_gqa=True).sum()

    for engine in ("loop", "eager"):
        with pytest.raises((RuntimeError, LossError)):
            per_sample_grads(
                loss, torch.eye(4), (torch.randn(3, 1, 3, 5, 4), torch.randn(3, 1, 2, 5, 4)), engine=engine
            )


@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask": torch.ones(5, 6, dtype=torch.long)},
        {"attn_mask": torch.ones(5, 6, dtype=torch.bool), "is_causal": True},
        {"attn_mask": torch.ones(4, 6, dtype=torch.bool)},
    ],
    ids=["int", "mask-and-causal", "shape"],
)
def test_masks_that_torch_refuses(options):
    def loss(w, q, k):
        return F.scaled_dot_product_attention(q @ w, k, k, **options).sum()

    w, q, k = torch.eye(4, dtype=torch.float64), draw(2, 5, 4), draw(2, 6, 4)
    for engine in ("loop", "eager"):
        with pytest.raises((RuntimeError, LossError)):
            per_sample_grads(loss, w, (q, k), engine=engine)


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no-weights"])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_multihead_attention(train, need_weights):
    layer = nn.MultiheadAttention(4, 2, add_bias_kv=True).train(train)
    missing = torch.tensor([False, False, True])

    def call(apply, x):
        return apply(x, x, x, need_weights=need_weights, key_padding_mask=missing)

    check_module(layer, draw(3, 4), call=call)


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no-weights"])
def test_multihead_attention_under_autocast(need_weights):
    layer, x = nn.MultiheadAttention(4, 2), torch.randn(B, 3, 4)
    names, params = zip(*layer.named_parameters(), strict=True)
    missing = torch.tensor([False, False, True])

    def loss(params, x):
        with torch.autocast("cpu", torch.bfloat16):
            module = functools.partial(functional_call, layer, dict(zip(names, params, strict=True)))
            return module((x, x, x), {"need_weights": need_weights, "key_padding_mask": missing})[0].float().sin().sum()

    def under(params, x):
        with VmapRules():
            return loss(params, x)

    with torch.no_grad():
        grads = vmap(once(under), in_dims=(None, 0))(params, x)
    rows = [torch.autograd.grad(loss(params, row), params) for row in x]
    assert_trees_close(grads, tuple(map(torch.stack, zip(*rows, strict=True))), 0.05)


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("first", [True, False], ids=["norm-first", "norm-last"])
def test_transformer_layers(first, train):
    options = {"dim_feedforward": 6, "dropout": 0.0, "norm_first": first, "batch_first": True}
    check_module(nn.TransformerEncoderLayer(4, 2, **options).train(train), draw(1, 3, 4))
    check_module(nn.TransformerDecoderLayer(4, 2, **options).train(train), draw(1, 3, 4), draw(1, 3, 4))


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_transformer(train):
    def call(apply, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)
        return apply(x, y, tgt_mask=mask, src_key_padding_mask=torch.tensor([[False, False, False, True]]))

    model = nn.Transformer(4, 2, 1, 1, 6, dropout=0.0, batch_first=True).train(train)
    check_module(model, draw(1, 4, 4), draw(1, 3, 4), call=call)
