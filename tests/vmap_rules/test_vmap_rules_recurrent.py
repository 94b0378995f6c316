"""Recurrent layers and cells under vmap."""

import functools

import pytest
import torch
from oracle import assert_trees_close, oracle
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree
from vmap_rules_cases import B, check, check_module, draw, measure, once, states, with_state

from persample import LossError, Mean, Norm, per_sample_grads
from persample.vmap_rules import VmapRules

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


class FlatGRU(nn.GRU):
    """Moves its weights into one block, as ``nn.GRU`` on a GPU does whenever they have changed."""

    def flatten_parameters(self):
        if {w.data_ptr() for w in self._flat_weights} and hasattr(self, "is_ready"):
            with torch.no_grad():
                torch._cudnn_rnn_flatten_weight(self._flat_weights, 4, 2, 3, 3, 0, 1, False, False)


@pytest.mark.parametrize("reduce", [None, Norm(), Mean()], ids=str)
@pytest.mark.parametrize("spelling", ["module", "functional_call"])
def test_weights_stay_where_they_are(spelling, reduce):
    layer, plain, x = FlatGRU(2, 3).double(), nn.GRU(2, 3).double(), draw(4, 5, 2)
    plain.load_state_dict(layer.state_dict())
    layer.is_ready = True
    loss = lambda layer, x: layer(x)[0].square().sum()
    of_dict = lambda p, x: functional_call(layer, p, (x,))[0].square().sum()
    call = (loss, layer) if spelling == "module" else (of_dict, dict(plain.named_parameters()))
    expected = per_sample_grads(loss, plain, x, reduce, engine="loop")
    assert_trees_close(per_sample_grads(*call, x, reduce), expected, 1e-9)


@pytest.mark.parametrize("engine", ["eager", "traced", "loop"])
@pytest.mark.parametrize("missing", ["deleted", "None"])
def test_a_layer_without_a_weight_that_is_not_called(missing, engine):
    model, x = nn.ModuleDict({"gru": nn.GRU(3, 4), "other": nn.GRU(3, 4), "used": nn.Linear(3, 2)}).double(), draw(5, 3)
    if missing == "deleted":
        del model["gru"].bias_hh_l0
    else:
        model["gru"].bias_hh_l0 = None
    before = [list(model[name]._flat_weights) for name in ("gru", "other")]
    found = per_sample_grads(lambda m, x: m["used"](x).square().sum(), model, x, Norm(), engine=engine)
    assert_trees_close(found, per_sample_grads(lambda m, x: m(x).square().sum(), model["used"], x, Norm()), 1e-9)
    after = [model[name]._flat_weights for name in ("gru", "other")]
    assert all(x is y for one, two in zip(before, after, strict=True) for x, y in zip(one, two, strict=True))
    assert not model["other"]._weights_have_changed()


def test_buffers_of_parametrized_weights_stay():
    layer = nn.utils.parametrizations.spectral_norm(nn.GRU(3, 4).double(), "weight_hh_l0").train()
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    per_sample_grads(lambda m, x: m(x)[0].square().sum(), layer, draw(2, 5, 3), Norm())
    assert_trees_close(dict(layer.named_buffers()), before, 0.0)


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


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_lengths_that_differ_between_samples_are_refused():
    def loss(model, x, length):
        packed = pack_padded_sequence(x[None], length[None], batch_first=True)
        return model(packed)[1].sum()

    batch = torch.randn(2, 4, 2), torch.tensor([3, 1])
    with pytest.raises(LossError, match=r"reads values of a sample .*pack_padded_sequence.*engine='loop'"):
        per_sample_grads(loss, nn.GRU(2, 3, batch_first=True), batch)


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


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_outputs_written_into(kind):
    def call(apply, x):
        out, state = apply(x)
        out.relu_()
        (state[0] if kind == "lstm" else state).mul_(2.0)
        return out, state

    check_module(KINDS[kind](2, 3), draw(4, 2), call=call)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_recurrent_weight(kind):
    layer = KINDS[kind](2, 3).double()
    params = {name: p.detach() for name, p in layer.named_parameters()}
    frozen = params.pop("weight_hh_l0")
    check(lambda p, x: functional_call(layer, {**p, "weight_hh_l0": frozen}, x), params, (draw(4, 2),))


def test_float32():
    gru = nn.GRU(2, 3)
    check(lambda p, x: functional_call(gru, p, x), dict(gru.named_parameters()), (torch.randn(B, 4, 2),), rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind):
    layer = KINDS[kind](2, 3)
    params = {name: p.detach() for name, p in layer.named_parameters()}
    x = torch.randn(B, 4, 2)

    def loss(params, x, autocast=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return functional_call(layer, params, x)[0].float().sin().sum()

    def under(params, x):
        with VmapRules():
            return loss(params, x)

    with torch.no_grad():
        grads = vmap(once(under), in_dims=(None, 0))(params, x)
    # In float32: oneDNN has bfloat16 LSTMs for processors with AVX-512 alone.
    rows = [grad(functools.partial(loss, autocast=False))(params, sample) for sample in x]
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


def test_an_infinite_gradient_passes_no_unit_that_relu_has_cut_off():
    layer, x = nn.RNN(3, 4, nonlinearity="relu").double(), draw(5, 2, 3)

    def loss(model, x):
        out = model(x)[0]
        return (out * torch.where(out > 0, 1, torch.inf)).sum()

    rows = oracle(loss, layer, (x,))
    expected = rows.tree(rows.grads)
    assert all(x.isfinite().all() for x in rows.grads)
    torch.testing.assert_close(per_sample_grads(loss, layer, x), expected, rtol=1e-9, atol=1e-12)
