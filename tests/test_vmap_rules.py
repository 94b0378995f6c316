"""Layers under vmap with our rules, against a loop over samples in plain torch."""

import functools

import pytest
import torch
from oracle import assert_trees_close, oracle
from torch import nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from persample import per_sample_grads
from persample.vmap_rules import VmapRules, attention, cross_entropy
from persample.vmap_rules.derivatives import is_differentiated_once

B = 3
KINDS = {"gru": nn.GRU, "lstm": nn.LSTM, "tanh": nn.RNN, "relu": functools.partial(nn.RNN, nonlinearity="relu")}
CELLS = {
    "gru": nn.GRUCell,
    "lstm": nn.LSTMCell,
    "tanh": nn.RNNCell,
    "relu": functools.partial(nn.RNNCell, nonlinearity="relu"),
}
OPTIONS = {
    "plain": {},
    "no-bias": {"bias": False},
    "deep": {"num_layers": 2},
    "both-ways": {"bidirectional": True},
    "deep-both-ways-batch-first": {"num_layers": 2, "bidirectional": True, "batch_first": True},
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def draw(*shape):
    return torch.randn(B, *shape, dtype=torch.float64)


def measure(out):
    """A number that every output has its own part in."""
    leaves = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return sum(((k + 1) * x).sin().sum() for k, x in enumerate(leaves))


def once(loss):
    """The gradient as the eager engine takes it: the backward pass is not recorded."""

    def gradient(params, *sample):
        value, backward = vjp(lambda params: loss(params, *sample), params)
        with torch.no_grad():
            return backward(torch.ones_like(value))[0]

    return gradient


def check(fn, params, batch, rtol=1e-9, recorded=False):
    """Compare gradients of parameters, and of a factor of all floats of the batch, with those of the loop."""
    dtype = next(x.dtype for x in pytree.tree_leaves(params))
    params = {"fn": pytree.tree_map(torch.Tensor.detach, params), "scale": torch.tensor(0.9, dtype=dtype)}

    def loss(params, *sample):
        scaled = [x * params["scale"] if x.is_floating_point() else x for x in sample]
        return measure(fn(params["fn"], *scaled))

    def under(params, *sample):
        with VmapRules():
            return loss(params, *sample)

    rows = oracle(loss, params, batch)
    with torch.set_grad_enabled(recorded):
        grads = vmap((grad if recorded else once)(under), in_dims=(None, *(0 for _ in batch)))(params, *batch)
    assert_trees_close(grads, rows.tree(rows.grads), rtol)


def check_module(module, *batch, call=None, **kwargs):
    module = module.double()
    call = call or (lambda apply, *sample: apply(*sample))

    def fn(params, *sample):
        return call(lambda *args, **options: functional_call(module, params, args, options), *sample)

    check(fn, dict(module.named_parameters()), batch, **kwargs)


def states(kind, *shape):
    return (draw(*shape), draw(*shape)) if kind == "lstm" else (draw(*shape),)


def with_state(apply, x, *state):
    return apply(x, state if len(state) > 1 else state[0])


@pytest.mark.parametrize("form", ["one-sequence", "batch-of-one", "state"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_layers(kind, option, form):
    layer = KINDS[kind](2, 3, **OPTIONS[option])
    passes = layer.num_layers * (1 + layer.bidirectional)
    if form == "one-sequence":
        check_module(layer, draw(4, 2))
    elif form == "batch-of-one":
        check_module(layer, draw(1, 4, 2) if layer.batch_first else draw(4, 1, 2))
    else:
        check_module(layer, draw(4, 2), *states(kind, passes, 3), call=with_state)


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_by_autograd_from_outside(kind):
    layer = KINDS[kind](2, 3, num_layers=2, bidirectional=True)
    check_module(layer, draw(4, 2), *states(kind, 4, 3), call=with_state, recorded=True)


@pytest.mark.parametrize("option", OPTIONS)
def test_projected_lstm(option):
    check_module(nn.LSTM(2, 4, proj_size=3, **OPTIONS[option]), draw(4, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_several_sequences_in_one_sample(kind):
    check_module(KINDS[kind](2, 3), draw(4, 2, 2), *states(kind, 1, 2, 3), call=with_state)


@pytest.mark.parametrize("lengths", [[4, 2, 2], [4, 4, 4], [1, 3, 2]], ids=str)
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_packed(kind, lengths):
    def call(apply, x):
        packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
        out, state = apply(packed)
        return pad_packed_sequence(out, batch_first=True, padding_value=2.0, total_length=5)[0], state

    check_module(KINDS[kind](2, 3, bidirectional=True), draw(3, 4, 2), call=call)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_packed_with_state(kind):
    def call(apply, x, y, *state):
        out, state = with_state(apply, pack_sequence([x, y]), *state)
        return pad_packed_sequence(out)[0], state

    check_module(KINDS[kind](2, 3), draw(4, 2), draw(2, 2), *states(kind, 1, 2, 3), call=call)


@pytest.mark.parametrize("form", ["vector", "batch-of-one", "state", "no-bias"])
@pytest.mark.parametrize("kind", CELLS)
def test_cells(kind, form):
    cell = CELLS[kind](2, 3, bias=form != "no-bias")
    if form == "state":
        check_module(cell, draw(2), *states(kind, 3), call=with_state)
    else:
        check_module(cell, draw(1, 2) if form == "batch-of-one" else draw(2))


def test_only_the_final_cell_state():
    check_module(nn.LSTM(2, 3), draw(4, 2), call=lambda apply, x: apply(x)[1][1])


def test_float32():
    gru = nn.GRU(2, 3)
    check(lambda p, x: functional_call(gru, p, x), dict(gru.named_parameters()), (torch.randn(B, 4, 2),), rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind):
    layer = KINDS[kind](2, 3)
    params = {name: p.detach() for name, p in layer.named_parameters()}
    x = torch.randn(B, 4, 2)

    def loss(params, x):
        with torch.autocast("cpu", torch.bfloat16):
            return functional_call(layer, params, x)[0].float().sin().sum()

    def under(params, x):
        with VmapRules():
            return loss(params, x)

    with torch.no_grad():
        grads = vmap(once(under), in_dims=(None, 0))(params, x)
    rows = [grad(loss)(params, sample) for sample in x]
    assert_trees_close(grads, pytree.tree_map(lambda *row: torch.stack(row), *rows), 0.05)


def test_dropout_between_layers():
    gru = nn.GRU(2, 3, num_layers=3, dropout=0.5).double()

    def loss(params, x):
        return measure(functional_call(gru, params, x))

    def under(params, x):
        with VmapRules():
            return loss(params, x)

    params = {name: p.detach() for name, p in gru.named_parameters()}
    x = draw(4, 2)
    rows = []
    for sample in x:
        torch.manual_seed(1)
        rows.append(grad(loss)(params, sample))
    torch.manual_seed(1)
    with torch.no_grad():
        same = vmap(once(under), in_dims=(None, 0), randomness="same")(params, x)
        different = vmap(once(under), in_dims=(None, 0), randomness="different")(params, x[:1].expand(B, -1, -1))
    assert_trees_close(same, pytree.tree_map(lambda *row: torch.stack(row), *rows), 1e-9)
    assert not torch.allclose(*different["weight_hh_l2"][:2])


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives(kind):
    layer = KINDS[kind](2, 3)

    def call(apply, x):
        return grad(lambda x: measure(apply(x)))(x)

    check_module(layer, draw(4, 2), call=call)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own way to forward mode
def test_forward_mode():
    check_module(nn.GRU(2, 3), draw(4, 2), call=lambda apply, x: jvp(lambda x: apply(x)[0], (x,), (x.cos(),))[1])


def test_weights_of_each_sample():
    gru = nn.GRU(2, 3).double()
    names, weights = zip(*((name, draw(*p.shape)) for name, p in gru.named_parameters()), strict=True)

    def fn(gain, x, *weights):
        return functional_call(gru, dict(zip(names, weights, strict=True)), gain * x)

    check(fn, torch.tensor(1.1, dtype=torch.float64), (draw(4, 2), *weights))


def test_sequences_mapped_within_a_sample():
    gru = nn.GRU(2, 3).double()
    params = {name: p.detach() for name, p in gru.named_parameters()}
    x = draw(2, 4, 2)

    def mapped(params, x):
        with VmapRules():
            return measure(vmap(lambda x: functional_call(gru, params, x)[0])(x))

    def looped(params, x):
        return measure(torch.stack([functional_call(gru, params, sequence)[0] for sequence in x]))

    with torch.no_grad():
        grads = vmap(once(mapped), in_dims=(None, 0))(params, x)
    rows = oracle(looped, params, (x,))
    assert_trees_close(grads, rows.tree(rows.grads), 1e-9)


def test_when_constants_are_allowed():
    seen = []

    def probe(x):
        seen.append(is_differentiated_once("torch.func"))
        return x.sin()

    x = torch.ones(B)
    with torch.no_grad():
        vmap(grad(probe))(x)
        vmap(lambda x: vjp(probe, x)[1](torch.ones(())))(x)
        grad(lambda x: vmap(probe)(x).sum())(x)
        vmap(grad(grad(probe)))(x)
        vmap(lambda x: jvp(probe, (x,), (x,)))(x)
        vmap(lambda x: jvp(grad(probe), (x,), (x,)))(x)
        vmap(probe)(x)
    vmap(grad(probe))(x)
    assert seen == [True] * 3 + [False] * 5


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


def test_attention_without_a_mask_is_one_call_of_the_fused_kernel_for_all_samples(monkeypatch):
    calls = []
    kernel = attention.aten_attention_cpu
    monkeypatch.setattr(
        attention, "aten_attention_cpu", lambda *args, **kw: calls.append(args[0].shape) or kernel(*args, **kw)
    )

    def loss(gain, x):
        with VmapRules():
            return F.scaled_dot_product_attention(gain * x, x, x, is_causal=True).sum()

    with torch.no_grad():
        vmap(once(loss), in_dims=(None, 0))(torch.tensor(1.1), torch.randn(B, 2, 5, 4))
    assert calls == [(B, 2, 5, 4)]


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


CROSS_ENTROPY = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignored": {"ignore_index": 2},
    "weight": {"weight": torch.linspace(0.5, 2, 6).double()},
    "smoothed": {"label_smoothing": 0.1},
}


@pytest.mark.parametrize("recorded", [False, True], ids=["once", "recorded"])
@pytest.mark.parametrize("option", CROSS_ENTROPY)
@pytest.mark.parametrize("lead", [(), (4,)], ids=str)
def test_cross_entropy(lead, option, recorded, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_MANY", 0)

    def fn(gain, logits, target):
        return F.cross_entropy(gain * logits, target, **CROSS_ENTROPY[option])

    target = torch.randint(6, (B, *lead))
    target.view(B, -1)[:, :1] = 1  # not all are ignored
    check(fn, torch.tensor(1.1, dtype=torch.float64), (draw(*lead, 6), target), recorded=recorded)


def test_cross_entropy_of_class_probabilities():
    def fn(gain, logits, target):
        return F.cross_entropy(gain * logits, target.softmax(-1))

    check(fn, torch.tensor(1.1, dtype=torch.float64), (draw(4, 6), draw(4, 6)))


def test_weight_norm():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    check_module(layer, draw(3))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("lead", [(), (4,), (2, 2)], ids=str)
def test_bilinear(lead, bias):
    check_module(nn.Bilinear(2, 3, 4, bias=bias), draw(*lead, 2), draw(*lead, 3))


@pytest.mark.parametrize("padding", [None, 2, -1], ids=["no-padding", "padding", "padding-from-end"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode, padding):
    bag = nn.EmbeddingBag(5, 3, mode=mode, padding_idx=padding)
    index = torch.randint(5, (B, 4, 3))
    index[0, 0] = 2 if padding is None else padding % 5  # nothing is left in this bag
    offsets = torch.tensor([[0, 2, 2, 5], [0, 0, 1, 2], [0, 6, 7, 7]])
    check_module(bag, index)
    check_module(bag, index.flatten(1)[:, :7], offsets)
    bag.include_last_offset = True
    check_module(bag, index.flatten(1)[:, :7], torch.cat([offsets, torch.full((B, 1), 7)], 1))
    if mode == "sum":
        check_module(bag, index, draw(4, 3), call=lambda apply, i, w: apply(i, per_sample_weights=w))


@pytest.mark.parametrize(
    "options", [{"max_norm": 0.5}, {"scale_grad_by_freq": True, "mode": "sum"}], ids=["norm", "frequency"]
)
def test_embedding_bags_left_alone(options):
    bag = nn.EmbeddingBag(5, 3, **options)
    index = torch.tensor([[1, 1, 4]])
    expected = bag(index)
    with VmapRules():
        assert torch.equal(bag(index), expected)


GETS = {
    "scalar": lambda x, i: x[i],
    "second": lambda x, i: x[:, i],
    "last": lambda x, i: x[..., i],
    "new-axis": lambda x, i: x[None, 1:, i],
    "two": lambda x, i: x[i, ..., i],
    "all": lambda x, i: x[i, i, i],
    "int": lambda x, i: x[0, i],
    "beside-tensor": lambda x, i: x[i, :, torch.tensor([0, 2])],
    "negative": lambda x, i: x[i - 3],
    "tensor": lambda x, i: x[i[None]],
    "one-hot": lambda x, i: x @ F.one_hot(i, 3).double(),
    "index-select-rows": lambda x, i: x[0].index_select(0, i[None]),
    "index-select-columns": lambda x, i: torch.index_select(x, dim=-1, index=i),
}


@pytest.mark.parametrize("get", GETS.values(), ids=GETS)
def test_lookups(get):
    def fn(params, x, i):
        return get(params * x, i), get(params, i)

    check(fn, draw(3, 3), (draw(3, 3, 3), torch.tensor([0, 2, 1])))


def test_items_of_constants_stay_views():
    x = torch.zeros(2, 2)
    with VmapRules():
        x[torch.tensor(1)].add_(1)
        assert x.tolist() == [[0, 0], [1, 1]]
        assert F.one_hot(torch.tensor([0, 2])).tolist() == [[1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("full", [True, False], ids=["full", "proportional"])
def test_gaussian_nll_loss(full, reduction):
    def fn(gain, x, y, log_var):
        each = F.gaussian_nll_loss(gain * x, y, log_var.exp(), full=full, reduction=reduction, eps=0.5)
        one = F.gaussian_nll_loss(gain * x, y, log_var[:, 0].exp(), full, reduction=reduction)
        return each, one, F.gaussian_nll_loss(gain * x, y, 0.7, reduction=reduction)

    check(fn, torch.tensor(1.1, dtype=torch.float64), (draw(4, 2), draw(4, 2), draw(4, 2)))
