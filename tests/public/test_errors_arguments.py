"""Everything that argument checking rejects: the message names the argument, what was received, and the fix."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import persample as ps
from persample import ArgumentError, per_sample_grads, set_grads

W, X = torch.tensor([0.5, -1.0, 2.0]), torch.arange(12.0).view(4, 3)
AVERAGES = [ps.Mean(), ps.ClippedMean(1.0), ps.SecondMoment(), ps.Variance(), ps.NoiseScale()]
SPREADS = [ps.Variance(), ps.NoiseScale()]


def linear(w, x):
    return w @ x


def any_loss(params, *sample):
    raise AssertionError("argument checking let it through")


def apply(model, x):
    return model(x).sum()


def says(*words):
    """The words, in this order, whatever stands between them."""
    return "(?s)" + ".*".join(re.escape(word) for word in words)


def refuse(*words, loss_fn=any_loss, params=W, batch=X, reduce=None, **options):
    with pytest.raises(ArgumentError, match=says(*words)) as caught:
        per_sample_grads(loss_fn, params, batch, reduce, **options)
    assert isinstance(caught.value, ValueError)


def named(reduction):
    return type(reduction).__name__


def batch_norm(**options):
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4, **options)))


def ragged(*lengths):
    array = np.empty(len(lengths), dtype=object)
    array[:] = [np.ones(length) for length in lengths]
    return array


def test_the_helper_that_compares_messages_can_fail():
    assert re.search(says("a(", "c"), "a( b\n c")
    assert not re.search(says("c", "a("), "a( b\n c")
    with pytest.raises(AssertionError, match="Regex pattern did not match"):
        refuse("no such words", batch=())


# loss_fn


@pytest.mark.parametrize("loss_fn", [3, None, "loss", X], ids=["int", "None", "str", "tensor"])
def test_loss_fn_must_be_callable(loss_fn):
    refuse("loss_fn:", "a function", f"received {type(loss_fn).__name__}", "(params, *sample)", loss_fn=loss_fn)


def test_loss_fn_that_takes_too_few_arguments():
    words = (
        "loss_fn:",
        "params and 2 argument(s)",
        "(w, x) (too many positional arguments)",
        "plain tuple is unpacked",
    )
    refuse(*words, loss_fn=linear, batch=(X, X))


def test_loss_fn_that_wants_more_than_the_one_argument_of_a_dict():
    words = ("loss_fn:", "params and 1 argument(s)", "missing a required argument: 'r'", "pass tuple(batch) or")
    refuse(*words, loss_fn=lambda w, s, r: w @ s * r, batch={"s": X, "r": X[:, 0]})


def test_a_list_of_episodes_of_equal_length_is_told_to_stack_them():
    words = ("loss_fn:", "params and 5 argument(s)", "plain list is unpacked", "to pass 5 samples, stack them")
    refuse(*words, loss_fn=lambda w, episode: (episode @ w).sum(), batch=[torch.ones(4, 3) for _ in range(5)])


def test_a_builtin_without_a_signature_passes():
    assert torch.equal(per_sample_grads(torch.dot, W, X), X)


# params


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, ("params:", "at least one floating tensor", "received none", "named_parameters()")),
        ({"a": [], "b": ()}, ("params:", "received none")),
        (None, ("params:", "received NoneType")),
        (0.5, ("params:", "received float", "torch.as_tensor")),
        (torch.arange(3), ("params:", "floating or complex", "dtype torch.int64", "Convert it")),
        (torch.ones(3, dtype=torch.bool), ("params:", "dtype torch.bool")),
        (
            {"w": W, "steps": torch.tensor(3)},
            ("params['steps']:", "dtype torch.int64", "pass what is not learned in batch"),
        ),
        ({"w": W, "bias": None}, ("params['bias']:", "received NoneType")),
        ([W, {"v": np.ones(3)}], ("params[1]['v']:", "received ndarray", "torch.as_tensor")),
        (nn.Linear(3, 1).parameters(), ("params:", "received an iterator")),
        (nn.Linear(3, 1).requires_grad_(False), ("params:", "parameters are all frozen", "requires_grad_(True)")),
        (nn.ReLU(), ("params:", "received none", "dict(model.named_parameters())")),
        (nn.Sequential(nn.LazyLinear(2)), ("params['0.weight']:", "uninitialized", "Run one forward pass")),
    ],
    ids=[
        *("empty", "empty-nested", "None", "number", "int-tensor", "bool-tensor", "int-leaf", "None-leaf"),
        *("numpy-leaf", "generator", "all-frozen", "no-parameters", "lazy"),
    ],
)
def test_params(params, words):
    refuse(*words, params=params)


def test_lazy_parameters_in_a_dict():
    with pytest.raises(ArgumentError, match=says("params['weight']:", "uninitialized")):
        per_sample_grads(any_loss, dict(nn.LazyLinear(2).named_parameters()), X)


def test_batch_norm_in_train_mode_is_named():
    fix = (".eval()", "GroupNorm", "track_running_stats=False")
    refuse("params:", "'1.1' (BatchNorm1d) in train mode", *fix, params=batch_norm(), batch=(X,))
    refuse("params:", "'1.1' (BatchNorm1d) in train mode", *fix, params={"net": batch_norm(), "w": W}, batch=(X,))
    refuse("params:", "received BatchNorm1d in train mode", params=nn.BatchNorm1d(3), batch=(X,))
    refuse("params:", "InstanceNorm1d", params=nn.InstanceNorm1d(3, affine=True, track_running_stats=True), batch=(X,))


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_batch_norm_in_eval_mode_or_without_statistics_works(engine):
    model = batch_norm().eval()
    got = per_sample_grads(apply, model, (X,), keep_batch_dim=True, engine=engine)
    assert got["1.1.weight"].shape == (4, 4)
    own = per_sample_grads(apply, batch_norm(track_running_stats=False), (X.view(2, 2, 3),), engine=engine)
    assert own["1.1.weight"].shape == (2, 4)


# batch


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (
            (X, {"r": X[:3]}),
            (
                "one common batch size",
                "batch[0]: 4, batch[1]['r']: 3",
                "set in_dims: an axis, or None",
                "accumulate({name: loss}",
            ),
        ),
        ({"s": X, "r": X[:1, 0]}, ("one common batch size", "batch['s']: 4, batch['r']: 1")),
        ([X, X[:2]], ("batch[0]: 4, batch[1]: 2", "Pad episodes", "pad_sequence", "mask")),
        ([(X, X[:, 0]), (X[:2], X[:2, 0])], ("batch[0][0]: 4, batch[0][1]: 4, batch[1][0]: 2", "Pad episodes")),
        ([np.ones((5, 2)), np.ones((3, 2))], ("batch[0]: 5, batch[1]: 3", "Pad episodes")),
        (([X[:3]] * 4, X[:, 0]), ("batch[0][0]: 3", "and 1 more", "Stack a list of samples (torch.stack")),
        (ragged(2, 3), ("batch:", "an array of numbers", "dtype object", "Pad episodes of different lengths", "mask")),
        ({"s": ragged(2, 3)}, ("batch['s']:", "dtype object", "Pad episodes")),
        ((X, np.array(["a", "b"])), ("batch[1]:", "an array of numbers", "dtype <U1", "Convert it")),
        (np.array(["2020-01-01"], "datetime64[D]"), ("batch:", "an array of numbers", "dtype datetime64[D]")),
        ((X, torch.tensor(0.9)), ("batch[1]:", "a batch axis 0", "a scalar", "in_dims=(None, (0, None))")),
        ((X, np.array(0.9)), ("batch[1]:", "a batch axis 0", "a scalar")),
        (X.to_sparse(), ("batch:", "a dense tensor", "sparse_coo", ".to_dense()")),
        ((X, object()), ("batch[1]:", "a tensor or NumPy array", "received object", "None in in_dims")),
        (nn.Linear(2, 1), ("batch:", "received Linear", "Pass the parameters before the batch")),
        ((row for row in X), ("batch:", "a tensor or NumPy array", "received generator")),
        *(
            (empty, ("batch:", "at least one tensor", "received none", "still has an axis of 1"))
            for empty in ((), {}, None)
        ),
        (("cart", 3.0, None), ("batch:", "at least one tensor", "received none")),
    ],
    ids=[
        *("sizes", "sizes-not-alike", "episodes", "fields", "numpy-episodes", "list-in-a-tuple", "ragged"),
        *("ragged-leaf", "strings", "dates", "scalar", "numpy-scalar", "sparse", "object", "module", "generator"),
        *("tuple()", "dict()", "None", "constants"),
    ],
)
def test_batch(batch, words):
    refuse(*words, batch=batch)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=["jagged", "strided"])
def test_nested_tensors_are_told_to_be_padded(layout):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    refuse("batch:", "one length", "a nested tensor", "Pad episodes", batch=nested)


def quantized(*shape):
    return torch.quantize_per_tensor(torch.ones(*shape), 0.1, 0, torch.qint8)


def masked(*shape):
    return torch.masked.masked_tensor(torch.ones(*shape), torch.ones(*shape) > 0)


def fake(*shape):
    with FakeTensorMode():
        return torch.ones(*shape)


def left(*shape):
    """Return a tensor of a vmap that has ended."""
    kept = []
    torch.func.vmap(lambda x: (kept.append(x), x)[1])(torch.ones(2, *shape))
    return kept[0]


def nested(*shape):
    return torch.nested.nested_tensor([torch.ones(2) for _ in range(shape[0])])


STRANGE = {
    "nested": nested,
    "quantized": quantized,
    "masked": masked,
    "fake": fake,
    "uninitialized": lambda *_: nn.UninitializedParameter(),
    "layout torch.sparse_coo": lambda *shape: torch.ones(*shape).to_sparse(),
    "layout torch.sparse_csr": lambda *shape: torch.ones(1, *shape).reshape(-1, shape[-1]).to_sparse_csr(),
    "layout torch._mkldnn": lambda *shape: torch.ones(*shape).to_mkldnn(),
    "transform that has ended|wrapper": left,
}


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of (nested|MaskedTensors)", "ignore:Sparse CSR", "ignore::UserWarning"
)
@pytest.mark.parametrize("place", ["params", "batch", "out", "weights"])
@pytest.mark.parametrize("kind", STRANGE)
def test_tensors_that_are_no_block_of_numbers(kind, place):
    shape = {"params": (3,), "batch": (4, 3), "out": (4, 3), "weights": (4,)}[place]
    for engine in ("eager", "loop", "auto"):
        options = {"params": W, "batch": X, place: STRANGE[kind](*shape)}
        with pytest.raises(ArgumentError, match=rf"^{place}: expected .*({kind}|4 finite real numbers)"):
            per_sample_grads(any_loss, options.pop("params"), options.pop("batch"), engine=engine, **options)


@pytest.mark.filterwarnings("ignore:The PyTorch API of (nested|MaskedTensors)")
@pytest.mark.parametrize("engine", ["eager", "loop", "auto", "traced", "compiled"])
@pytest.mark.parametrize("frozen", [False, True], ids=["buffer", "frozen"])
@pytest.mark.parametrize("kind", ["nested", "masked", "fake", "uninitialized"])
def test_modules_that_hold_what_is_no_block_of_numbers(kind, frozen, engine):
    model, held = nn.Sequential(nn.Linear(3, 1)), STRANGE[kind](4, 3)
    if frozen:
        model[0].held = held if kind == "uninitialized" else nn.Parameter(held, requires_grad=False)
        model[0].held.requires_grad = False
    else:
        model[0].register_buffer("held", held)
    with pytest.raises(ArgumentError, match=rf"^params\['0.held'\]: expected .*{kind}"):
        per_sample_grads(lambda m, x: m(x).sum(), model, X, engine=engine)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore::UserWarning")
@pytest.mark.parametrize("engine", ["eager", "loop", "auto"])
@pytest.mark.parametrize("kind", ["layout torch.sparse_coo", "layout torch.sparse_csr", "layout torch._mkldnn"])
def test_frozen_parameters_without_strides(kind, engine):
    model = nn.Linear(3, 1)
    model.held = nn.Parameter(STRANGE[kind](3, 3), requires_grad=False)
    found = per_sample_grads(lambda m, x: m(x).sum(), model, X, engine=engine)
    assert torch.equal(found["weight"][:, 0], X)


def test_the_padding_hint_is_for_leaves_that_differ_in_length_alone():
    with pytest.raises(ArgumentError) as caught:
        per_sample_grads(any_loss, W, (X, X[:2].long()))
    assert "Pad" not in str(caught.value)


def test_own_parameters_of_another_number_than_samples():
    refuse("batch:", "one common batch size", "params: 5, batch: 4", params=torch.ones(5, 3), in_dims=(0, 0))


def test_own_parameters_are_no_episodes():
    with pytest.raises(ArgumentError) as caught:
        per_sample_grads(any_loss, torch.ones(5, 3), X, in_dims=(0, 0))
    assert "Pad" not in str(caught.value)


class Unnamed:
    """A pytree whose children have no names."""

    def __init__(self, *children):
        self.children = children


pytree.register_pytree_node(Unnamed, lambda node: (list(node.children), None), lambda children, _: Unnamed(*children))


def test_leaves_without_names_are_counted():
    refuse("one common batch size", "batch<leaf 0>: 4, batch<leaf 1>: 3", batch=Unnamed(X, X[:3]))


# in_dims


@pytest.mark.parametrize(
    ("in_dims", "words"),
    [
        ((None, 0, 0, 0), ("in_dims:", "received (None, 0, 0, 0)", "Write in_dims=(None, (0, 0, 0)).")),
        ([0, 0, None], ("in_dims:", "Write in_dims=(0, (0, None)).")),
        (0, ("in_dims:", "(params_dims, batch_dims)", "received 0", "Write in_dims=(None, 0).")),
        (1, ("in_dims:", "received 1", "Write in_dims=(None, 1).")),
        (None, ("in_dims:", "received None", "Write in_dims=(None, 0).")),
        ((0,), ("in_dims:", "received (0,)", "Write in_dims=(None, 0).")),
        ((), ("in_dims:", "received ()", "Write in_dims=(None, 0).")),
        ({"x": 0}, ("in_dims:", "received {'x': 0}", "Write in_dims=(None, 0).")),
        ((None, True), ("in_dims[1]:", "an int, None, or a tree prefix", "received True")),
        ((False, 0), ("in_dims[0]:", "received False")),
        ((None, 0.0), ("in_dims[1]:", "received 0.0")),
        ((None, "0"), ("in_dims[1]:", "received '0'")),
        (
            (None, (0, 0, 0)),
            ("in_dims[1]:", "for 2 leaves", "received (0, 0, 0)", "Match the structure (0, 0)"),
        ),
        ((None, {"s": 0}), ("in_dims[1]:", "received {'s': 0}", "Match the structure")),
        ((None, (0, {"r": 0})), ("in_dims[1]:", "received (0, {'r': 0})")),
        (({"w": 0}, 0), ("in_dims[0]:", "for 1 leaves", "received {'w': 0}", "Match the structure")),
        ((None, 2), ("batch[0]:", "a batch axis 2", "shape [4, 3]")),
        ((None, (-3, 0)), ("batch[0]:", "a batch axis -3", "shape [4, 3]")),
        ((None, (0, 1)), ("batch[1]:", "a batch axis 1", "shape [4]", "mark what all samples share with None")),
        ((1, 0), ("params:", "a batch axis 1", "shape [3]")),
        ((None, None), ("batch:", "at least one tensor with a batch axis", "received none")),
    ],
    ids=str,
)
def test_in_dims(in_dims, words):
    refuse(*words, batch=(X, X[:, 0]), in_dims=in_dims)


def test_modules_take_no_in_dims():
    words = ("in_dims[0]:", "None for modules", "received 0", "torch.func.stack_module_state")
    refuse(*words, params=nn.Linear(3, 1), batch=(X,), in_dims=(0, 0))


def test_what_a_message_spells_is_accepted():
    with pytest.raises(ArgumentError) as caught:
        per_sample_grads(any_loss, W, X, in_dims=True)
    assert "True)" not in str(caught.value)


# weights and averages


@pytest.mark.parametrize(
    ("weights", "received"),
    [
        (torch.ones(3), "shape [3], torch.float32"),
        (torch.ones(4, 1), "shape [4, 1]"),
        (2.0, "shape []"),
        ([], "shape [0]"),
        ([1.0, 2.0, 3.0, float("nan")], "NaN or infinity"),
        ([1.0, 2.0, 3.0, float("inf")], "NaN or infinity"),
        (torch.ones(4, dtype=torch.complex64), "shape [4], torch.complex64"),
        (["a", "b", "c", "d"], "['a', 'b', 'c', 'd']"),
        ([1.0, None, 1.0, 1.0], "None"),
        ([[1], [1, 2], 1, 1], "[[1], [1, 2], 1, 1]"),
        ({"a": 1.0}, "{'a': 1.0}"),
    ],
    ids=["short", "column", "number", "empty", "nan", "inf", "complex", "strings", "None-inside", "ragged", "dict"],
)
def test_weights(weights, received):
    refuse("weights: expected 4 finite real numbers", received, "one number per sample, shape [B]", weights=weights)


@pytest.mark.parametrize("reduction", AVERAGES, ids=named)
@pytest.mark.parametrize("wrap", [lambda r: r, lambda r: {"norms": ps.Norm(), "x": [r]}], ids=["alone", "in-container"])
def test_averages_over_nothing(reduction, wrap):
    name, reduce = f"{type(reduction).__name__}():", wrap(reduction)
    refuse(
        name,
        "add up to more than",
        "B = 0",
        "Take more samples, leave such a batch out, or ask for a sum",
        batch=X[:0],
        reduce=reduce,
    )
    fix = "An average takes weights >= 0"
    refuse(name, "weights that sum to 0, the smallest 0", fix, reduce=reduce, weights=[0.0] * 4)
    refuse(name, "weights that sum to 5, the smallest -1", fix, "Sum()", reduce=reduce, weights=[-1, 2, 2, 2])


@pytest.mark.parametrize("reduction", SPREADS, ids=named)
def test_one_sample_has_no_spread(reduction):
    refuse(named(reduction), "add up to more than 1", "received B = 1", batch=X[:1], reduce=reduction)
    refuse(
        named(reduction), "more than 1", "weights that sum to 1,", reduce=reduction, weights=[True, False, False, False]
    )


def test_variance_needs_more_than_its_correction():
    refuse("Variance():", "more than 4", "received B = 4", reduce=ps.Variance(correction=4))
    assert torch.equal(per_sample_grads(linear, W, X[:1], ps.Variance(correction=0)), torch.zeros(3))


def test_sums_take_the_weights_that_averages_refuse():
    for weights in ([0.0] * 4, [-1.0, 2.0, 2.0, 2.0]):
        got = per_sample_grads(linear, W, X, {"sum": ps.Sum(), "norms": ps.Norm()}, weights=weights)
        torch.testing.assert_close(got["sum"], torch.tensor(weights) @ X)


# options


@pytest.mark.parametrize("chunk_size", [0, -1, 1.5, 2.0, True, "2"], ids=repr)
def test_chunk_size(chunk_size):
    words = ("chunk_size: expected a positive int or None", f"received {chunk_size!r}", "None for all")
    refuse(*words, chunk_size=chunk_size)


@pytest.mark.parametrize("engine", ["Eager", "jit", "", None, 0], ids=repr)
def test_engine(engine):
    refuse(
        "engine: expected 'eager' or 'traced' or 'compiled' or 'loop'",
        f"received {engine!r}",
        "Pick one",
        engine=engine,
    )


@pytest.mark.parametrize("randomness", ["diff", "Same", None, True], ids=repr)
@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_randomness(randomness, engine):
    words = ("randomness: expected 'error' or 'same' or 'different'", f"received {randomness!r}", "Pick one")
    refuse(*words, randomness=randomness, engine=engine)


# reduce


@pytest.mark.parametrize(
    ("reduce", "words"),
    [
        (ps.Mean, ("reductions such as Mean()", "sums.Mean'", "Call it: Mean(…).")),
        ({"norms": ps.Norm(), "x": [ps.ClippedSum]}, ("ClippedSum", "Call it: ClippedSum(…).")),
        (3, ("reductions such as Mean()", "received 3", "{'update': Mean()}")),
        ("Mean", ("received 'Mean'", "Pass for example Mean()")),
        ({"a": ps.Mean(), "b": 0.5}, ("received 0.5",)),
        (torch.mean, ("received <built-in method mean", "Pass for example Mean()")),
        ({}, ("expected a reduction, received an empty {}", "None for the per-sample gradients")),
        ((), ("received an empty ()",)),
        ([[], {"a": ()}], ("received an empty [[], {'a': ()}]",)),
    ],
    ids=["class", "class-inside", "number", "str", "number-inside", "function", "dict()", "tuple()", "nested-empty"],
)
def test_reduce(reduce, words):
    refuse("reduce:", *words, reduce=reduce)


# the reductions' own arguments


@pytest.mark.parametrize("reduction", [ps.ClippedSum, ps.ClippedMean], ids=["ClippedSum", "ClippedMean"])
@pytest.mark.parametrize(
    "max_norm",
    [-1, -1e-9, float("nan"), "x", None, True, 1j, torch.tensor(-1.0), torch.ones(2)],
    ids=["-1", "-1e-9", "nan", "str", "None", "bool", "complex", "negative-tensor", "vector"],
)
def test_max_norm(reduction, max_norm):
    with pytest.raises(
        ArgumentError, match=says("max_norm: expected a number >= 0", repr(max_norm), "inf clips nothing")
    ):
        reduction(max_norm)


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"weight": 1.0, "bias": -1.0}, ("max_norm['bias']: expected a number >= 0, received -1.0", "inf clips")),
        ({"weight": 1.0}, ("max_norm: expected bounds by parameter or module, received no bound for ['bias']",
                           "The parameters are ['weight', 'bias']; '' stands for all")),
        ({"": 1.0, "head": 2.0, "wei": 1.0}, ("received bounds for ['head', 'wei'], which name no parameter",)),
        ({"": 1.0, "weight": 2.0, "bias": 1.0}, ("received bounds for [''], which name no parameter",)),
        ({}, ("received no bound for ['weight', 'bias']",)),
        ({"weigth": 1.0, "bias": 1.0},
         ("received no bound for ['weight'], and bounds for ['weigth'], which name no parameter",)),
        ({0: 1.0}, ("max_norm: expected names as keys, received 0", "Name parameters as in 'layers.0.weight'")),
    ],
    ids=["negative", "missing", "unknown", "no-others", "empty", "misspelt", "number"],
)  # fmt: skip
def test_bounds_by_name(bounds, words):
    with pytest.raises(ArgumentError, match=says(*words)):
        per_sample_grads(lambda m, x: m(x).sum(), nn.Linear(3, 1), torch.ones(2, 3), ps.ClippedMean(bounds))


@pytest.mark.parametrize("correction", [-1, float("nan"), "x", None], ids=repr)
def test_correction(correction):
    words = ("correction: expected a number >= 0", f"received {correction!r}", "1 for the unbiased", "0 for the plain")
    with pytest.raises(ArgumentError, match=says(*words)):
        ps.Variance(correction)


def test_a_bool_is_no_correction():
    with pytest.raises(ArgumentError, match="correction"):
        per_sample_grads(linear, W, X, ps.Variance(correction=True))


@pytest.mark.parametrize("dim", [0, -1, 1.5, True, "8", None], ids=repr)
def test_project_dim(dim):
    words = ("dim: expected a positive int", f"received {dim!r}", "how much to keep of each sample")
    with pytest.raises(ArgumentError, match=says(*words)):
        ps.Project(dim, seed=0)


@pytest.mark.parametrize("weight_fn", [0.5, None, torch.ones(4)], ids=["number", "None", "tensor"])
def test_weight_fn_must_be_callable(weight_fn):
    words = ("weight_fn: expected a function from one 0-d norm", f"received {weight_fn!r}", "torch.where instead of if")
    with pytest.raises(ArgumentError, match=says(*words)):
        ps.WeightedSum(weight_fn)


@pytest.mark.parametrize("engine", ["eager", "loop"])
@pytest.mark.parametrize(
    ("weight_fn", "received"),
    [
        (lambda norm: norm.expand(2), "returns shape [2]"),
        (lambda norm: 1.0 if norm > 1 else 0.0, "fails: vmap"),
        (lambda norm: norm.item(), "fails: vmap"),
        (lambda norm: None, "fails"),
    ],
    ids=["vector", "if", "item", "None"],
)
def test_weight_fn_acts_on_one_norm(weight_fn, received, engine):
    words = ("weight_fn:", "one 0-d norm to one 0-d scale", received, "torch.where instead of if")
    refuse(*words, loss_fn=linear, reduce=ps.WeightedSum(weight_fn), engine=engine)


@pytest.mark.parametrize("weight_fn", [lambda norm: "x", lambda norm, other: norm], ids=["str", "arity"])
def test_weight_fn_that_fails_in_other_ways(weight_fn):
    refuse("weight_fn:", "one 0-d norm", loss_fn=linear, reduce=ps.WeightedSum(weight_fn))


def test_weight_fn_returns_real_numbers(recwarn):
    refuse("weight_fn:", loss_fn=linear, reduce=ps.WeightedSum(lambda norm: norm * 1j))
    assert not recwarn.list


PAIR = {"w": torch.ones(3), "b": torch.tensor(0.0)}


@pytest.mark.parametrize(
    ("direction", "stacked", "words"),
    [
        (W, False, ("the structure TreeSpec(dict, ['w', 'b']", "received *", "a tree like the parameters")),
        ({"w": W}, False, ("the structure TreeSpec(dict, ['w', 'b']", "received TreeSpec(dict, ['w']")),
        ({"w": W[:2], "b": W[0]}, False, ("shape [3] for params['w']", "shape [2]")),
        ({"w": W, "b": W[:1]}, False, ("shape [] for params['b']", "shape [1]")),
        (
            {"w": X, "b": X[:, 0]},
            False,
            ("shape [3] for params['w']", "shape [4, 3]", "K directions on axis 0 need stacked=True"),
        ),
        ({"w": np.ones(3), "b": W[0]}, False, ("params['w']", "received ndarray")),
        ({"w": W, "b": 0.0}, False, ("params['b']", "received float")),
        ({"w": W, "b": W[0]}, True, ("params['w']", "received shape [3]", "stacked=True")),
        ({"w": X, "b": X[:3, 0]}, True, ("shape [4] for params['b']", "received shape [3]")),
        ({"w": W[0], "b": X[:, 0]}, True, ("K directions of one common K", "params['w']", "shape []")),
    ],
    ids=[
        *("no-tree", "part-of-tree", "shape", "0-d-shape", "stacked-unasked", "numpy", "number"),
        *("not-stacked", "different-K", "scalar"),
    ],
)
def test_dot_direction(direction, stacked, words):
    refuse("Dot(direction): expected", *words, params=PAIR, reduce=ps.Dot(direction, stacked=stacked))


def test_a_complex_direction_of_real_params():
    refuse("Dot(direction)", "real numbers for params", "complex64", loss_fn=linear, reduce=ps.Dot(W + 1j))


def test_a_real_direction_of_complex_params_counts_as_complex():
    def loss(w, x):
        return (w * x).abs().square().sum()

    got = [per_sample_grads(loss, W + 1j, X, ps.Dot(direction)) for direction in (W, W + 0j)]
    torch.testing.assert_close(*got)


def test_directions_go_by_key():
    def loss(p, x):
        return p["w"] @ x + p["b"]

    got = per_sample_grads(loss, PAIR, X, ps.Dot({"b": W[0], "w": W}))
    torch.testing.assert_close(got, X @ W + W[0])


# out


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (
            {"w": torch.zeros(4, 3)},
            ("out: expected shape [4, 3]", "received dict", "what the same call returned"),
        ),
        ([torch.zeros(4, 3)], ("out: expected shape [4, 3]", "received list")),
        (torch.zeros(4, 2), ("out: expected shape [4, 3], torch.float32 on cpu", "received shape [4, 2]", "same call")),
        (torch.zeros(3, 3), ("out: expected shape [4, 3]", "received shape [3, 3]")),
        (
            torch.zeros(4, 3, dtype=torch.float64),
            ("out: expected shape [4, 3], torch.float32", "shape [4, 3], torch.float64"),
        ),
        (np.zeros((4, 3)), ("out: expected shape [4, 3]", "received ndarray")),
        (torch.zeros(4, 3, device="meta"), ("out:", "on cpu", "on meta")),
    ],
    ids=["structure", "list", "columns", "rows", "dtype", "numpy", "device"],
)
def test_out(out, words):
    refuse(*words, loss_fn=linear, out=out)


@pytest.mark.parametrize(("first", "shape"), [(ps.Norm(), (4,)), (ps.Stack(), (4, 3))], ids=["norms", "stack"])
@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"engine": "loop"}], ids=["whole", "chunks", "loop"])
def test_out_names_the_leaf_and_is_not_written(first, shape, options):
    out = {"first": torch.full(shape, 7.0), "sum": torch.full((2,), 7.0)}
    reduce = {"first": first, "sum": ps.Sum()}
    refuse("out['sum']: expected shape [3]", "received shape [2]", loss_fn=linear, reduce=reduce, out=out, **options)
    assert all(torch.equal(x, torch.full_like(x, 7.0)) for x in out.values())


def test_factors_are_not_written_into():
    previous = per_sample_grads(linear, W, X, {"f": ps.Factored()})
    refuse("out['f']: expected a result of tensors", "Dense", "out=None for Factored()", loss_fn=linear,
           reduce={"f": ps.Factored()}, out=previous)  # fmt: skip


def test_out_of_overlapping_memory():
    refuse("out:", loss_fn=linear, out=torch.zeros(3).expand(4, 3))


@pytest.mark.parametrize("engine", ["eager", "loop"])
@pytest.mark.parametrize("leaf", [True, False])
def test_out_that_requires_grad(engine, leaf):
    out = torch.zeros(4, 3, requires_grad=True)
    refuse("out: expected a tensor that does not require grad", "received one that does", "same call returned",
           loss_fn=linear, out=out if leaf else 1 * out, engine=engine)  # fmt: skip


# set_grads and the losses


@pytest.mark.parametrize(
    ("grads", "words"),
    [
        ({"weight": torch.ones(1, 3)}, ("grads:", "by name", "missing ['bias'], unknown or frozen []", "Mean()")),
        ({"weight": torch.ones(1, 3), "bias": W[:1], "b": W}, ("grads:", "missing [], unknown or frozen ['b']")),
        (
            {"weight": torch.ones(4, 1, 3), "bias": W[:1]},
            ("grads['weight']:", "shape [1, 3]", "shape [4, 1, 3]", "Mean()"),
        ),
    ],
    ids=["missing", "unknown", "not-reduced"],
)
def test_set_grads(grads, words):
    module = nn.Linear(3, 1)
    with pytest.raises(ArgumentError, match=says(*words)):
        set_grads(module, grads)
    assert module.weight.grad is None
    assert module.bias.grad is None


def test_set_grads_of_a_frozen_parameter():
    module = nn.Linear(3, 1)
    module.bias.requires_grad_(False)
    with pytest.raises(ArgumentError, match=says("grads:", "missing [], unknown or frozen ['bias']")):
        set_grads(module, {"weight": torch.ones(1, 3), "bias": torch.ones(1)})


@pytest.mark.parametrize("grads", [{"weight": None}, torch.ones(1, 3)], ids=["None-leaf", "no-dict"])
def test_set_grads_of_other_things(grads):
    with pytest.raises(ArgumentError, match="grads"):
        set_grads(nn.Linear(3, 1, bias=False), grads)


def test_reinforce_reduction():
    logits, a_t, return_t = torch.zeros(3, 2), torch.zeros(3, dtype=torch.long), torch.ones(3)
    words = ("reduction: expected 'sum', 'mean' or 'none'", "received 'max'", "REINFORCE estimator")
    with pytest.raises(ArgumentError, match=says(*words)):
        ps.losses.reinforce_loss(logits, a_t, return_t, reduction="max")


# whatever is refused, nothing has changed


def test_a_refused_call_leaves_the_module_and_the_random_stream_alone():
    model = batch_norm()
    model[0].weight.grad = grad = torch.ones(4, 3)
    before, stream = {**dict(model.named_parameters()), **dict(model.named_buffers())}, torch.get_rng_state()
    refuse("BatchNorm1d", params=model, batch=(X,))
    model.eval()
    refuse("Mean()", params=model, batch=(X[:0],), reduce=ps.Mean())
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert model[0].weight.grad is grad
    assert torch.equal(torch.get_rng_state(), stream)
