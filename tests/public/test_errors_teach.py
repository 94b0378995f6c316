"""The mistakes of a first day: each error says what to write instead, and the traceback starts at the user's line."""

from __future__ import annotations

import traceback
from collections import UserDict
from types import TracebackType

import numpy as np
import pytest
import torch
from seams import with_rule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from persample import (
    ArgumentError,
    Gram,
    LossError,
    Mean,
    accumulate,
    check,
    composite_grads,
    explain,
    per_sample_grads,
    set_grads,
)
from persample.rl import categorical_policy, collect_episodes, collect_transitions, gaussian_policy, make_envs
from persample.utils.origin import LIBRARY

ENGINES = ["eager", "traced", "compiled", "loop", "auto"]
IMAGES, CLASSES = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 1])
MLP = nn.Linear(3, 1)


def cnn():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3))


def classify(model, x, y):
    return F.cross_entropy(model(x), y)


def squares(model, x):
    return model(x).square().sum()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_cnn(engine):
    model = cnn()
    hint = (
        r"loss_fn sees one sample, without the batch axis: batch\[0\] of shape \[1, 8, 8\], batch\[1\] of shape \[\]\. "
        r"If the model .*keep_batch_dim=True: then batch\[0\] has the shape \[1, 1, 8, 8\]"
    )
    with pytest.raises(RuntimeError, match=rf"(?s)mat1 and mat2 shapes cannot be multiplied .*{hint}") as caught:
        per_sample_grads(classify, model, (IMAGES, CLASSES), Mean(), engine=engine)
    assert type(caught.value) is RuntimeError
    assert str(caught.value).count("one sample") == 1
    # What it says, works.
    found = per_sample_grads(classify, model, (IMAGES, CLASSES), Mean(), engine=engine, keep_batch_dim=True)
    expected = torch.autograd.grad(classify(model, IMAGES, CLASSES), list(model.parameters()))
    torch.testing.assert_close(list(found.values()), list(expected))


@pytest.mark.parametrize("engine", ENGINES)
def test_images_without_channels_with_a_batch_axis(engine):
    hint = r"one sample, with a batch axis of 1: batch\[0\] of shape \[1, 8, 8\], batch\[1\] of shape \[1\]\."
    with pytest.raises(RuntimeError, match=rf"(?s)shapes cannot be multiplied .*{hint}"):
        per_sample_grads(classify, cnn(), (IMAGES[:, 0], CLASSES), engine=engine, keep_batch_dim=True)


@pytest.mark.parametrize("engine", ["eager", "loop"])
@pytest.mark.parametrize(
    ("params", "kind"), [(list(cnn().parameters()), "list"), (cnn().state_dict(), r"collections\.OrderedDict")]
)
def test_a_tree_of_parameters_is_no_model(params, kind, engine):
    with pytest.raises(
        TypeError, match=rf"'{kind}' object is not callable\nparams is a tree .* Pass the module itself, or dict"
    ):
        per_sample_grads(classify, params, (IMAGES, CLASSES), engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_parameters_come_first(engine):
    with pytest.raises(
        TypeError, match=r"'Tensor' object is not callable\nparams come first .* loss_fn\(model, x, y\)"
    ):
        per_sample_grads(lambda x, y, model: classify(model, x, y), cnn(), (IMAGES, CLASSES), engine=engine)


@pytest.mark.parametrize("engine", ["eager", "traced", "loop"])
def test_labels_in_a_list_are_no_tensor(engine):
    with pytest.raises(TypeError, match=r"(?s)A list of numbers in the batch is not one tensor.*torch\.tensor"):
        per_sample_grads(lambda m, x, y: m(x).sum() * y, MLP, (torch.ones(4, 3), [1.0, 2.0, 3.0, 4.0]), engine=engine)


@pytest.mark.parametrize("engine", ["eager", "traced", "loop"])
def test_mappings_have_no_attributes(engine):
    batch = UserDict(ids=torch.ones(4, 3))
    with pytest.raises(AttributeError, match=r"comes as a dict: write \['ids'\] for \.ids"):
        per_sample_grads(lambda m, batch: m(batch.ids).sum(), MLP, batch, engine=engine)


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_both_parts_of_a_complex_loss(engine):
    w = torch.ones(3, dtype=torch.complex64)
    with pytest.raises(LossError, match=r"view_as_real\(loss\), with outputs='rows'"):
        per_sample_grads(lambda w, x: (w * x).sum(), w, torch.ones(4, 3), engine=engine)
    rows = per_sample_grads(
        lambda w, x: torch.view_as_real((w * x).sum()), w, torch.ones(4, 3), outputs="rows", engine=engine
    )
    assert rows.shape == (4, 2, 3)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("params", [{"w": torch.ones(2, 3)}, nn.Linear(3, 2)])
def test_a_list_in_the_batch_is_a_tree(engine, params):
    def loss(params, x):
        return nn.functional.linear(x, params["w"]).sum() if isinstance(params, dict) else params(x).sum()

    rows = [torch.ones(4, 3), torch.zeros(4, 3)]
    hint = r"must be Tensor, not list\nA list in params or batch is a tree: .* stack them first \(torch\.stack\)"
    with pytest.raises(TypeError, match=hint):
        per_sample_grads(loss, params, (rows,), engine=engine)
    with pytest.raises(AttributeError, match=r"'list' object has no .*\nA list in params or batch is a tree"):
        per_sample_grads(lambda params, x: x.sum(), params, (rows,), engine=engine)
    found = per_sample_grads(loss, params, (torch.stack(rows, 1),), Mean(), engine=engine)  # what it says, works
    assert all(x.abs().sum() > 0 for x in found.values())


@pytest.mark.parametrize(
    ("fails", "error"),
    [([].pop, IndexError), (lambda: int("abc"), ValueError), (lambda: 3 + None, TypeError)],
)
def test_a_loss_that_fails_in_python_runs_once_and_once_with_a_batch_axis(fails, error):
    calls = []

    def loss(model, x):
        calls.append(x)
        return model(x).sum() * fails()

    with pytest.raises(error):
        per_sample_grads(loss, nn.Linear(3, 2), torch.ones(4, 3))
    assert [x.ndim for x in calls] == [1, 2]


class Unpacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, ids):
        b, t = ids.shape
        return self.table(ids).view(b, 4 * t)


class Checked(nn.Linear):
    def forward(self, x):
        if x.ndim != 2:
            raise ValueError("a batch of vectors is expected")
        return super().forward(x)


WANT_A_BATCH = {
    "x[:, 0]": (lambda m, x: m(x)[:, 0].sum(), nn.Linear(3, 2), torch.ones(4, 3), IndexError),
    "b, t = ids.shape": (lambda m, i: m(i).sum(), Unpacked(), torch.ones(4, 6, dtype=torch.int64), ValueError),
    "bmm": (lambda m, x: torch.bmm(m(x), m(x).mT).sum(), nn.Linear(3, 2), torch.ones(4, 5, 3), RuntimeError),
    "a check of the model's": (lambda m, x: m(x).sum(), Checked(3, 2), torch.ones(4, 3), ValueError),
    "an assertion": (
        lambda w, x: (w * x).sum() if x.ndim == 2 else 1 / 0,
        torch.ones(3),
        torch.ones(4, 3),
        ArithmeticError,
    ),
    "len of a scalar": (lambda w, x: w * x.sum() / len(x), torch.ones(()), torch.ones(4), TypeError),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", WANT_A_BATCH)
def test_a_sample_that_passes_with_a_batch_axis_has_the_hint(case, engine):
    loss, params, x, error = WANT_A_BATCH[case]
    hint = r"pass keep_batch_dim=True: then batch has the shape \[1.*\], and the loss runs\."
    with pytest.raises(error, match=rf"loss_fn sees one sample, without the batch axis: batch of .*{hint}") as caught:
        per_sample_grads(loss, params, x, Mean(), engine=engine)
    assert str(caught.value).count("one sample") == 1
    per_sample_grads(loss, params, x, Mean(), engine=engine, keep_batch_dim=True)  # what it says, works


def test_the_hint_is_of_the_sample_that_fails():
    """The third sample fails in both shapes, the first in none."""

    def loss(w, x):
        if x.sum() < 0:
            raise ValueError("a negative sample")
        return (w * x).sum()

    with pytest.raises(ValueError, match=r"^a negative sample$"):
        per_sample_grads(loss, torch.ones(3), torch.tensor([1.0, 1, -1])[:, None] * torch.ones(3), engine="loop")


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_encoders_have_the_hint_too(engine):
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten()).eval()
    hint = (
        r"encode_fn sees one sample, .*inputs of shape \[1, 8, 8\]\. .*keep_batch_dim=True: then inputs has the shape"
    )
    with pytest.raises(ValueError, match=rf"(?s)expected 4D input.*{hint}"):
        composite_grads(lambda m, x: m(x), lambda z: z.logsumexp(0).sum(), net, IMAGES, engine=engine)


def test_arguments_that_are_swapped_are_shown():
    with pytest.raises(RuntimeError, match=r"at least 1D.*\n.*batch\[0\] of shape \[\], batch\[1\] of shape \[3\]"):
        per_sample_grads(classify, nn.Linear(3, 4), (CLASSES.float(), torch.ones(4, 3)))


def test_many_ragged_episodes_are_padded():
    """500 leaves are not listed; nobody wants 500 entries in in_dims."""
    episodes = [torch.ones(3 + row % 7, 4) for row in range(500)]
    with pytest.raises(
        ArgumentError, match=r"batch\[3\]: 6 and 496 more\. Stack a list.*pad_sequence\) and pass a mask"
    ) as e:
        per_sample_grads(classify, cnn(), episodes)
    assert len(str(e.value)) < 500


def test_data_are_converted_to_the_dtype_of_the_parameters():
    model = nn.Linear(4, 2).double()
    with pytest.raises(LossError, match=r"mixes dtypes .* for example x\.to\(torch\.float64\)"):
        per_sample_grads(lambda p, x: p(x).sum(), model, (torch.ones(3, 4),))


@pytest.mark.parametrize("collect", [collect_episodes, collect_transitions])
def test_observations_are_not_those_of_a_float64_policy(collect):
    policy, envs = nn.Linear(4, 2).double(), make_envs("CartPole-v1")
    with pytest.raises(
        RuntimeError, match=r"(?s)dtype.*Observations are of torch.float32\. .* lambda o: network\(o\.d"
    ):
        collect(envs, policy, 2, seed=0)
    collect(envs, lambda o: policy(o.double()), 2, seed=0)


def test_a_batch_in_the_place_of_factors():
    with pytest.raises(
        ArgumentError, match=r"Gram\(other\): .* received a tensor\. Pass what per_sample_grads returns"
    ):
        per_sample_grads(classify, cnn(), (IMAGES, CLASSES), Gram(IMAGES))


def test_one_batch_is_no_iterable_of_batches():
    with pytest.raises(ArgumentError, match=r"`accumulate` takes batches: pass \[batch\] for one"):
        accumulate(classify, cnn(), (IMAGES, CLASSES), Mean())


SHAPES = {
    "an image without channels": (nn.Conv2d(1, 2, 3), torch.randn(4, 8, 8), RuntimeError),
    "batch norm of a vector": (nn.BatchNorm1d(3).eval(), torch.randn(4, 3), ValueError),
    "batch norm of an image": (nn.BatchNorm2d(3).eval(), torch.randn(4, 3, 2, 2), ValueError),
    "the axis of the features": (lambda x: torch.cat([x, x], 1), torch.randn(4, 3), IndexError),
    "a view by rows": (lambda x: x.view(2, 7), torch.randn(4, 3), RuntimeError),
    "sizes that do not fit": (lambda x: x + torch.ones(4), torch.randn(4, 3), RuntimeError),
}


@pytest.mark.parametrize("engine", ["eager", "loop"])
@pytest.mark.parametrize("case", SHAPES)
def test_errors_of_shapes_say_that_there_is_one_sample(case, engine):
    layer, x, error = SHAPES[case]
    with pytest.raises(error, match=r"loss_fn sees one sample, without the batch axis: batch of shape") as caught:
        per_sample_grads(lambda w, x: (w * layer(x)).sum(), torch.ones(()), x, engine=engine)
    assert type(caught.value) is error


@pytest.mark.parametrize("engine", ["eager", "loop"])
def test_other_errors_say_nothing_of_it(engine):
    with pytest.raises(IndexError) as caught:
        per_sample_grads(lambda w, x: (w * x)[5], torch.ones(3), torch.ones(4, 3), engine=engine)
    assert "one sample" not in str(caught.value)
    with pytest.raises(RuntimeError, match="expected target dtype") as caught:
        per_sample_grads(classify, nn.Linear(3, 4), (torch.ones(4, 3), CLASSES.float()), engine=engine)
    assert "one sample" not in str(caught.value)


CALLS = {
    "parameters()": (
        lambda: per_sample_grads(squares, MLP.parameters(), torch.ones(4, 3)),
        r"params: expected a module, .* received an iterator\. Pass the module itself, or dict\(model",
    ),
    "x and y apart": (
        lambda: per_sample_grads(classify, MLP, IMAGES, CLASSES),
        r"reduce: .* received a tensor of shape \[4\]\. .* one argument, batch, a tuple: pass \(x, y\), not x, y",
    ),
    "x, y and z apart": (lambda: per_sample_grads(classify, MLP, IMAGES, CLASSES, CLASSES), r"pass \(x, y\), not"),
    "x, y and z of a stream": (lambda: accumulate(classify, MLP, IMAGES, CLASSES, CLASSES), r"pass \(x, y\), not x, y"),
    "an option without its name": (lambda: check(squares, MLP, IMAGES, None, False), "reduce: .* received False"),
    "reductions apart": (lambda: explain(squares, MLP, IMAGES, Mean(), Gram()), r"received 2 arguments\. .*in a tuple"),
    "arrays apart": (lambda: per_sample_grads(classify, MLP, IMAGES, np.ones(4)), r"pass \(x, y\), not x, y"),
    "x without y": (
        lambda: per_sample_grads(classify, MLP, IMAGES),
        r"loss_fn: .*\(missing a required argument: 'y'\).*a plain tuple several\. .*pass \[batch\] for one",
    ),
    "the model before the loss": (
        lambda: per_sample_grads(MLP, squares, torch.ones(4, 3)),
        r"params: expected a floating .* received function\. Pass functions first, then the parameters\.",
    ),
    "a criterion as the loss": (
        lambda: per_sample_grads(nn.CrossEntropyLoss(), MLP, (IMAGES, CLASSES)),
        r"loss_fn: expected to take params and 2 arg.* Pass a function that calls the model too, .* criterion\(model",
    ),
    "a loader": (
        lambda: per_sample_grads(squares, MLP, DataLoader(torch.ones(4, 3))),
        r"batch: .* received DataLoader\. Pass one of its batches, or all of them to accumulate\(loss_fn, params, b",
    ),
    "one batch that is a mapping": (
        lambda: accumulate(lambda m, b: squares(m, b["x"]), MLP, UserDict(x=torch.ones(4, 3)), Mean()),
        r"batches: expected an iterable of batches, .* received UserDict\. For a single batch, pass \[batch\]",
    ),
    "samples in a list": (
        lambda: per_sample_grads(classify, MLP, [(torch.ones(3), torch.tensor(0))] * 4),
        r"batch\[0\]\[1\]: expected a batch axis 0, received a scalar\. .*default_collate makes a batch of a list",
    ),
    "an optimizer to set gradients of": (
        lambda: set_grads(torch.optim.SGD(MLP.parameters(), 0.1), {}),
        r"module: expected an nn\.Module, received SGD\. Pass the module .*optimizer\.step\(\)",
    ),
    "an optimizer for the model": (
        lambda: per_sample_grads(squares, torch.optim.SGD(MLP.parameters(), 0.1), torch.ones(4, 3)),
        r"params: expected a floating .* received SGD\. Pass the module whose parameters it changes\.",
    ),
    "ragged episodes": (
        lambda: per_sample_grads(squares, MLP, [torch.ones(t, 3) for t in (2, 5)]),
        r"batch: .* batch\[0\]: 2, batch\[1\]: 5.*Pad episodes .*pad_sequence\) and pass a mask",
    ),
    "logits as a network": (
        lambda: categorical_policy(torch.ones(2, 3)),
        r"network: expected a callable, received Tensor\. Pass a module or a function",
    ),
    "means as a network": (lambda: gaussian_policy((MLP, 1.0)), r"network: expected a callable, received tuple"),
    "actions as logits": (
        lambda: categorical_policy(lambda s: s.argmax(1))(torch.ones(2, 3), torch.Generator()),
        r"network: expected logits of shape \[2, A\], received shape \(2,\).*takes \(observations, generator\)",
    ),
    "values before logits": (
        lambda: categorical_policy(lambda s: (s[:, :1], s))(torch.ones(2, 3), torch.Generator()),
        r"network: expected \(logits \[2, A\], values \[2\]\), received values of shape \[2, 3\]\. Return the logits",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_bad_calls(case):
    call, match = CALLS[case]
    with pytest.raises(ArgumentError, match=match):
        call()


# Tracebacks


def files(error):
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def deep(model, x):
    def inner(y):
        return model(y).sum() + {}["mine"]

    return inner(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_loss_comes_right_after_the_call(engine):
    for loss, error in ((deep, KeyError), (classify, TypeError), (lambda m, x: m(x[:2]).sum(), RuntimeError)):
        batch = (torch.ones(4, 3),) if loss is not classify else (torch.ones(4, 3), torch.ones(4))
        model = MLP if loss is not classify else nn.Sequential(nn.Module())  # which has no forward
        params = {"model": model, "w": torch.ones(1)}
        with pytest.raises((error, NotImplementedError)) as caught:
            per_sample_grads(lambda p, *sample, loss=loss: loss(p["model"], *sample), params, batch, engine=engine)
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert [frame.filename for frame in frames[:2]] == [__file__] * 2
        assert frames[1].name == "<lambda>"
        assert not any(frame.filename.startswith(LIBRARY) for frame in frames)


def test_errors_of_before_stay_as_they_are():
    try:
        per_sample_grads(deep, MLP, (torch.ones(4, 3),), {"norm": 0})
    except ArgumentError as error:
        earlier = error
        frames = [LIBRARY + "file.py", *files(earlier)]
        earlier.__traceback__ = TracebackType(earlier.__traceback__, _of_ours(), 0, 1)
        with pytest.raises(KeyError) as caught:
            per_sample_grads(deep, MLP, (torch.ones(4, 3),))
        assert caught.value.__context__ is earlier
        assert files(earlier) == frames


def _of_ours():
    """A frame of a function of the library."""
    space = {}
    exec(compile("import sys\ndef f():\n  return sys._getframe()", LIBRARY + "file.py", "exec"), space)
    return space["f"]()


def test_a_fault_of_the_library_shows_where(monkeypatch):
    fault = "def bilinear(*args):\n    raise ValueError('ours')"
    space = {}
    exec(compile(fault, LIBRARY + "file.py", "exec"), space)
    with_rule(monkeypatch, F.bilinear, space["bilinear"])
    with pytest.raises(ValueError, match="ours") as caught:
        per_sample_grads(lambda m, x: m(x, x).sum(), nn.Bilinear(2, 2, 3), (torch.ones(4, 5, 2),))
    assert files(caught.value)[-1] == LIBRARY + "file.py"


def test_errors_of_the_library_show_the_call_alone():
    with pytest.raises(ArgumentError) as caught:
        per_sample_grads(squares, MLP, 3)
    assert files(caught.value) == [__file__]
    with pytest.raises(LossError) as caught:
        per_sample_grads(lambda m, x: m(x).sum() * x[0].item(), MLP, torch.ones(4, 3))
    assert files(caught.value) == [__file__]
    assert files(caught.value.__cause__) == [__file__]  # the line of the loss
